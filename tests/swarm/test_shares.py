"""Shares by bandwidth: the slowest member is done as soon as it can be, and all compute the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_cli.swarm.allreduce.shares import ALIKE, FASTEST, MOST, counted_uploads, shares_of

UPLOADS = st.lists(st.integers(0, 200_000), min_size=1, max_size=12)


def finish(uploads: list[int], shares: tuple[int, ...], members: int) -> Fraction:
    """When the slowest reducer has sent all, in the time that 1 kbit/s needs for the gradients."""
    whole = sum(shares)
    return max(
        (1 + Fraction(share, whole) * (members - 2)) / upload for share, upload in zip(shares, uploads, strict=True)
    )


@given(UPLOADS, st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_shares_are_never_worse_than_equal_ones(uploads: list[int], clients: int) -> None:
    members, counted = len(uploads) + clients, counted_uploads(uploads)
    shares = shares_of(uploads, members)
    assert len(shares) == len(uploads) and sum(shares) > 0 and min(shares) >= 0
    if len(uploads) > 1:
        assert 2 * max(shares) <= sum(shares) + len(shares), "nobody has more than half"
    if members > 2:
        equal = finish(counted, (1,) * len(uploads), members)
        assert finish(counted, shares, members) <= equal * Fraction(1001, 1000)


@given(st.lists(st.integers(1_000, 100_000), min_size=3, max_size=8))
@settings(max_examples=100, deadline=None)
def test_no_other_shares_are_done_sooner(uploads: list[int]) -> None:
    """Who has a share is done when all others that have one are, or has the most that one may have."""
    members, counted = len(uploads), counted_uploads(uploads)
    shares = shares_of(uploads, members)
    whole = sum(shares)
    times = [
        (1 + Fraction(share, whole) * (members - 2)) / upload
        for share, upload in zip(shares, counted, strict=True)
        if share and 2 * share < whole - len(shares)
    ]
    assert max(times, default=1) <= min(times, default=1) * Fraction(1001, 1000)
    assert all(1 / Fraction(upload) >= max(times, default=0) * Fraction(999, 1000)
               for share, upload in zip(shares, counted, strict=True) if not share)  # fmt: skip


@pytest.mark.parametrize(
    ("uploads", "members", "shares"),
    [
        ([100_000, 100_000, 100_000, 10_000], 4, (1, 1, 1, 0)),
        ([95_000, 88_000, 100_000, 91_000], 4, (1, 1, 1, 1)),
        ([0, 0, 0], 5, (1, 1, 1)),
        ([0, 100_000, 100_000, 10_000], 4, (0, 1, 1, 0)),
        ([10_000] * 8 + [100_000] * 8, 16, (0,) * 8 + (1,) * 8),
        ([10**12, 2 * 10**12, FASTEST], 3, (1, 1, 1)),
        ([50_000, 10_000], 9, (1, 1)),
        ([50_000, 10_000], 2, (1, 1)),
        ([7], 3, (1,)),
        ([], 1, ()),
    ],
)
def test_shares(uploads: list[int], members: int, shares: tuple[int, ...]) -> None:
    assert shares_of(uploads, members) == shares


def test_one_fast_line_among_slow_ones_has_half() -> None:
    shares = shares_of([1_000_000] + [10_000] * 15, 16)
    assert shares[0] == MOST and len({*shares[1:]}) == 1 and sum(shares) == pytest.approx(2 * MOST, rel=1e-3)


def test_lines_that_nearly_are_count_as_alike() -> None:
    edge = int(ALIKE * 100_000)
    assert counted_uploads([100_000, edge, edge - 1, 0]) == [100_000, 100_000, edge - 1, edge - 1]

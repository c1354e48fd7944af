"""The cut of the gradients: every element in exactly one part, whole blocks, equal shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_cli.swarm.layout import ALIGNMENT, PART_ELEMENTS, Layout

LARGE = 1000
SIZES = st.lists(st.integers(1, 3 * PART_ELEMENTS), min_size=1, max_size=6)


def layout(sizes: list[int]) -> Layout:
    return Layout({f"t{index}": torch.Size([size]) for index, size in enumerate(sizes)}, LARGE)


@given(SIZES, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_parts_follow_each_other_over_the_whole_buffer(sizes: list[int], reducers: int) -> None:
    made = layout(sizes)
    position, reducer = 0, 0
    for part in made.parts(reducers):
        assert part.start == position and 0 < part.elements <= PART_ELEMENTS + ALIGNMENT
        assert part.large == (part.stop <= made.boundary)
        assert part.reducer >= reducer
        if part.large:
            assert part.start % ALIGNMENT == 0
        position, reducer = part.stop, part.reducer
    assert position == made.size


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_tensors_do_not_overlap_and_large_ones_share_no_block(sizes: list[int]) -> None:
    made = layout(sizes)
    flat = torch.zeros(made.size)
    views = made.views(flat)
    for index, view in enumerate(views):
        view.fill_(index + 1)
    assert [view.numel() for view in views] == sizes
    assert all(bool((view == index + 1).all()) for index, view in enumerate(views))
    for block in flat[: made.boundary].view(-1, ALIGNMENT):
        assert len(block[block != 0].unique()) == 1


def test_shares_are_equal_to_within_a_block() -> None:
    made = layout([32_000_000, 500, 700])
    shares = [0] * 4
    for part in made.parts(4):
        shares[part.reducer] += part.elements * (1 if part.large else 2)
    assert max(shares) - min(shares) <= 2 * ALIGNMENT


def test_more_reducers_than_blocks() -> None:
    made = layout([1000])
    parts = made.parts(8)
    assert sum(part.elements for part in parts) == made.size
    assert len(parts) <= 4


def test_a_group_needs_a_reducer() -> None:
    with pytest.raises(ValueError, match="without a reducer"):
        layout([1000]).parts(0)

"""CenteredClip: the mean among honest members, near it whatever a minority sends, and the same bytes everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import normal
from swarm.rounds import CODEC

from tt_cli.kernel_choice import Implementation
from tt_cli.run import load_run
from tt_cli.swarm.allreduce.average_buffer import part_hash
from tt_cli.swarm.allreduce.clipping import centered_clip as clipping
from tt_cli.swarm.allreduce.clipping.centered_clip import (
    MAX_VOTE,
    VOTES,
    ReceivedPart,
    average_part,
    centered_clip,
    weighted_mean,
)
from tt_cli.swarm.allreduce.clipping.clip_kernels import LANES, PortableClip
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition

ELEMENTS = 3000
BLOCKWISE = codec_of(load_run("emoji").replaced({"swarm.compression": "blockwise8"}))
TRUTH = normal(1, ELEMENTS, scale=0.3)


def gradient(member: int, weight: float, noise: float = 3.0) -> torch.Tensor:
    """The mean over so many samples."""
    return TRUTH + normal(100 + member, ELEMENTS, scale=noise / math.sqrt(weight))


def sent(member: int, values: torch.Tensor, weight: float, large: bool = True, codec=CODEC) -> ReceivedPart:  # type: ignore[no-untyped-def]
    spread = float(values.double().square().mean().sqrt()) if bool(values.isfinite().all()) else 0.0
    return ReceivedPart(f"p{member}", codec.of(large).encode(values), weight, spread)


def honest(weights: list[float], large: bool = True) -> list[ReceivedPart]:
    return [sent(member, gradient(member, weight), weight, large) for member, weight in enumerate(weights)]


def clip(contributions: list[ReceivedPart], large: bool = True) -> tuple[torch.Tensor, dict[str, float]]:
    return centered_clip(CODEC, contributions, ELEMENTS, large)[:2]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("large", [True, False])
@given(st.lists(st.integers(1, 400).map(float), min_size=3, max_size=12))
@settings(deadline=None, max_examples=40, derandomize=True)  # of other noise, one part in a few hundred loses a member
def test_honest_members_of_any_sizes_get_their_mean_to_the_last_bit(large: bool, weights: list[float]) -> None:
    members = honest(weights, large)
    average, clipped = clip(members, large)
    assert not clipped
    assert torch.equal(average, weighted_mean(CODEC, members, ELEMENTS, large))


@pytest.mark.parametrize("factor", [-1.0, -100.0, 100.0, 1e12])
def test_three_of_ten_move_the_average_no_further_than_their_noise(factor: float) -> None:
    weights = [20.0] * 10
    members = honest(weights)
    alone, _ = clip(members[3:])
    for liar in range(3):
        members[liar] = sent(liar, gradient(liar, 20.0) * factor, 20.0)
    average, clipped = clip(members)
    noise = 3.0 / math.sqrt(140.0) * math.sqrt(ELEMENTS)
    assert float((average - alone).norm()) < (1e-9 if abs(factor) > 1 else 3 * noise)
    assert set(clipped) <= {"p0", "p1", "p2"}
    if abs(factor) > 1:
        assert clipped == {"p0": 0.0, "p1": 0.0, "p2": 0.0}, "who is that far away has no part in the average"


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_a_flipped_sign_shows_though_it_is_no_further_away_than_noise(seed: int) -> None:
    """As it is in training: a member's noise is about as large as the gradient."""
    draws = [normal(seed + member, 3 * ELEMENTS, scale=0.4) for member in range(10)]
    clear = normal(2, 3 * ELEMENTS, scale=0.3)
    members = [
        sent(member, (clear + noise) * (-1.0 if member < 3 else 1.0), 20.0) for member, noise in enumerate(draws)
    ]
    average, clipped, _ = centered_clip(CODEC, members, 3 * ELEMENTS, True)
    assert clipped == {"p0": 0.0, "p1": 0.0, "p2": 0.0}
    assert torch.equal(average, weighted_mean(CODEC, members[3:], 3 * ELEMENTS, True))


@pytest.mark.parametrize("noise", [0.0, 3.0], ids=["alike", "each with noise of its own"])
def test_who_leans_the_same_way_within_the_radius_is_left_out(noise: float) -> None:
    members = honest([20.0] * 10)
    steady = normal(7, ELEMENTS, scale=1.6 * 3.0 / math.sqrt(20.0))
    for liar in range(3):
        members[liar] = sent(liar, gradient(liar, 20.0, noise) + steady, 20.0)
    average, clipped = clip(members)
    assert clipped == {"p0": 0.0, "p1": 0.0, "p2": 0.0}
    assert torch.equal(average, weighted_mean(CODEC, members[3:], ELEMENTS, True))


@pytest.mark.parametrize("strength", [0.2, 0.4, 0.5, 0.6, 0.8, 1.2, 1.6, 2.5])
def test_however_far_three_of_ten_lean_the_average_leans_by_a_sixth_of_their_noise_at_most(strength: float) -> None:
    """Undetected they move it by three tenths of what they lean."""
    members = honest([20.0] * 10)
    noise = 3.0 / math.sqrt(20.0)
    direction = normal(7, ELEMENTS)
    for liar in range(3):
        members[liar] = sent(liar, gradient(liar, 20.0) + direction * (strength * noise), 20.0)
    average, _ = clip(members)
    leans = float(((average - TRUTH) @ direction) / (direction @ direction)) / noise
    assert leans < 0.17


def test_copies_of_a_members_gradient_cost_at_most_what_it_sent() -> None:
    """Who is copied looks as if it leant with those who copy it."""
    members = honest([20.0] * 10)
    for liar in range(3):
        members[liar] = sent(liar, gradient(3, 20.0), 20.0)
    average, clipped = clip(members)
    assert set(clipped) <= {"p0", "p1", "p2", "p3"}
    rest = weighted_mean(CODEC, members[4:], ELEMENTS, True)
    assert float((average - rest).norm()) <= 3.0 / math.sqrt(140.0) * math.sqrt(ELEMENTS)


def test_a_member_with_most_of_the_samples_must_still_be_near_the_others() -> None:
    weights = [1000.0, 20.0, 20.0, 20.0]
    members = honest(weights)
    average, clipped = clip(members)
    assert not clipped, "an honest one with many samples is not far from the others"
    members[0] = sent(0, -50 * gradient(0, 1000.0), 1000.0)
    average, clipped = clip(members)
    assert clipped == {"p0": 0.0}
    assert torch.equal(average, weighted_mean(CODEC, members[1:], ELEMENTS, True))


@pytest.mark.parametrize("claimed", [61.0, 600.0, 1e6])
def test_nobody_weighs_more_than_all_others(claimed: float) -> None:
    """Near them, so that it is not clipped: with what it claims the average would be its own."""
    values = TRUTH + 0.05
    averages = [
        average_part(CODEC, "centered_clip", [*honest([20.0] * 3), sent(3, values, weight)], ELEMENTS, True)
        for weight in (claimed, 60.0)
    ]
    assert averages[0].encoded == averages[1].encoded and not averages[0].clipped
    mean = average_part(CODEC, "mean", [*honest([20.0] * 3), sent(3, values, claimed)], ELEMENTS, True)
    assert mean.encoded != averages[0].encoded


def test_a_part_that_only_one_member_has_a_gradient_for_is_not_lost() -> None:
    """Rare tokens: their rows of an embedding are zero for whoever did not meet them."""
    members = [ReceivedPart(f"p{i}", CODEC.of(True).encode(torch.zeros(ELEMENTS)), 10.0, 1.0) for i in range(5)]
    one = torch.zeros(ELEMENTS)
    one[:64] = 2.0
    members[2] = ReceivedPart("p2", CODEC.of(True).encode(one), 10.0, 1.0)
    average, clipped = clip(members)
    assert not clipped and float(average[:64].min()) > 0.3
    for sender in range(5, 10):  # two more know the token
        encoded = members[2 if sender < 7 else 0].encoded
        members.append(ReceivedPart(f"p{sender}", encoded, 10.0, 1.0))
    average, clipped = clip(members)
    assert float(average[:64].min()) > 0.5


@given(st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=20))
@settings(deadline=None)
def test_no_member_has_most_of_the_votes(weights: list[float]) -> None:
    votes = clipping._votes(np.array(weights)).tolist()
    assert max(votes) == VOTES and min(votes) >= 1
    assert max(votes) <= MAX_VOTE * sum(votes) + len(votes)
    order = np.argsort(weights, kind="stable")
    assert all(votes[i] <= votes[j] for i, j in zip(order, order[1:], strict=False))


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_the_median_is_the_weighted_one(members: int, columns: int, seed: int) -> None:
    draws = np.random.Generator(np.random.PCG64(seed))
    rows = draws.integers(-5, 5, (members, columns)).astype(np.float32)
    votes = draws.integers(1, 4, members)
    out = np.empty(columns, np.float32)
    PortableClip().median(rows, votes, out)
    spread_out = np.sort(np.repeat(rows, votes, axis=0), axis=0)
    middle = len(spread_out)
    expected = (spread_out[(middle - 1) // 2] + spread_out[middle // 2]) / 2
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("members", [3, 4, 7, 10, 33])
@pytest.mark.parametrize("columns", [1, 63, LANES, 2 * LANES + 77])
def test_compiled_and_portable_kernels_give_the_same_bytes(members: int, columns: int) -> None:
    from tt_cli.swarm.allreduce.clipping.centered_clip_numba import NumbaClip

    draws = np.random.Generator(np.random.PCG64(members * columns))
    rows = (draws.standard_t(2, (members, columns)) * 10.0 ** draws.uniform(-30, 30)).astype(np.float32)
    rows[0, : columns // 2] = -0.0
    rows[1, : columns // 3] = 0.0
    votes = draws.integers(1, VOTES, members)
    found = []
    for kernels in (PortableClip(), NumbaClip()):
        centre = np.empty(columns, np.float32)
        kernels.median(rows, votes, centre)
        gram = np.zeros((members + 1, members + 1))
        kernels.add_products(rows, centre, gram)
        found.append((centre.tobytes(), gram.tobytes()))
    every = np.vstack((rows - centre, centre)).astype(float)
    assert np.allclose(gram, np.triu(every @ every.T), atol=1e-9 * np.abs(gram).max())
    assert found[0] == found[1]


def test_how_much_is_looked_at_together_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    members = attacked(1)
    whole = clip(members)
    monkeypatch.setattr(clipping, "TOGETHER", LANES)
    pieces = clip(members)
    assert torch.equal(whole[0], pieces[0]) and whole[1] == pieces[1]


def attacked(seed: int) -> list[ReceivedPart]:
    members = honest([10.0, 20.0, 30.0, 5.0, 25.0])
    members[seed % 5] = sent(seed % 5, gradient(seed, 9.0) * (3.0 + seed), 10.0)
    return members


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_kernels_change_no_byte(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        compiled = [average_part(CODEC, "centered_clip", attacked(seed), ELEMENTS, True) for seed in range(6)]
        chosen = Implementation(PortableClip(), "portable", "")
        monkeypatch.setattr(clipping, "implementation", lambda: chosen)
        portable = [average_part(CODEC, "centered_clip", attacked(seed), ELEMENTS, True) for seed in range(6)]
    finally:
        torch.set_num_threads(before)
    assert compiled == portable
    assert any(part.clipped for part in compiled)
    assert [part_hash(part.encoded).hex() for part in compiled] == GOLDEN


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 255, 3000, 2**15 + 300]), st.booleans())
@settings(deadline=None, max_examples=30)
def test_the_bound_of_a_norm_is_above_it_and_near(seed: int, elements: int, large: bool) -> None:
    values = normal(seed, elements)
    for codec in (CODEC, BLOCKWISE):
        encoded = codec.of(large).encode(values)
        decoded = torch.empty(elements)
        codec.of(large).decode_into(encoded, decoded)
        found, norm = codec.most_norm(encoded, elements, large), float(decoded.double().norm())
        assert found >= 0.999 * norm
        assert elements < 3000 or found <= 6 * norm


def test_a_spread_is_that_of_all_parts_from_a_piece_of_each() -> None:
    values = {"large": normal(1, 2**16, scale=2.0), "small": normal(2, 500, scale=30.0)}
    layout = Partition({name: value.shape for name, value in values.items()}, 2**16, CODEC.block)
    buffer = GradientBuffer(layout, CODEC)
    for name, value in values.items():
        buffer.encode(name, value)
    exact = float(torch.cat([*values.values()]).double().square().mean().sqrt())
    assert clipping.spread(buffer, layout.parts((1,))) == pytest.approx(exact, rel=0.02)


def test_two_members_and_mean_runs_take_the_mean() -> None:
    two = honest([10.0, 20.0])
    two[1] = sent(1, gradient(1, 20.0) * 100, 20.0)
    right = CODEC.of(True).encode(weighted_mean(CODEC, two, ELEMENTS, True))
    made = average_part(CODEC, "centered_clip", two, ELEMENTS, True)
    assert made.encoded == right and not made.clipped
    three = attacked(1)
    assert average_part(CODEC, "mean", three, ELEMENTS, True).clipped == frozenset()


@pytest.mark.parametrize("weight", [1e-20, 1e-300])
def test_who_claims_next_to_no_weight_widens_nobodys_radius(weight: float) -> None:
    """Its noise would have no bounds; no reducer takes such a weight, and no audit."""
    members = [*honest([8.0] * 5), sent(5, normal(7, ELEMENTS, scale=1000.0), 8.0)]
    right, clipped = clip(members)
    average, with_light = clip([*members, sent(6, gradient(6, 8.0), weight)])
    assert with_light == clipped == {"p5": 0.0} and apart(average, right) < 0.01


def test_weight_nought_counts_nowhere() -> None:
    members = honest([20.0] * 3)
    nothing = sent(7, torch.full((ELEMENTS,), 1e30), 0.0)
    for aggregation in ("mean", "centered_clip"):
        plain = average_part(CODEC, aggregation, members, ELEMENTS, True)  # type: ignore[arg-type]
        assert average_part(CODEC, aggregation, [nothing, *members], ELEMENTS, True) == plain  # type: ignore[arg-type]
    empty = average_part(CODEC, "centered_clip", [nothing] * 3, ELEMENTS, True)
    zeros = torch.empty(ELEMENTS)
    CODEC.of(True).decode_into(empty.encoded, zeros)
    assert not zeros.any()


def test_a_majority_of_huge_numbers_does_not_overflow() -> None:
    members = honest([20.0] * 3)
    huge = [sent(10 + i, torch.full((ELEMENTS,), 8e37 * (-1) ** i), 20.0) for i in range(4)]
    made = average_part(CODEC, "centered_clip", [*members, *huge], ELEMENTS, True)
    assert set(made.huge) <= {each.sender for each in huge}
    average = torch.empty(ELEMENTS)
    CODEC.of(True).decode_into(made.encoded, average)
    assert float(average.abs().max()) <= 1e18


def test_the_papers_codec_is_averaged_alike() -> None:
    members = [sent(m, gradient(m, 20.0), 20.0, codec=BLOCKWISE) for m in range(4)]
    members[1] = sent(1, gradient(1, 20.0) * -100, 20.0, codec=BLOCKWISE)
    average, clipped, _ = centered_clip(BLOCKWISE, members, ELEMENTS, True)
    assert clipped == {"p1": 0.0} and apart(average, TRUTH) < 2.0


GOLDEN = [
    "8bd732e2ef8214aefb14eb9beced626f",
    "5727f30e311b60d8e2f5432cfc937253",
    "6bfb31535361ff8dfc36a5a072567dc9",
    "5dc1d29e881d2ed6be0a3704be3d94fd",
    "217f18c559baf0a86f608d3661efa43a",
    "51c4a1f2271b6cb2851cfa90ebbace63",
]

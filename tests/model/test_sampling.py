"""Filters and sampling on logits small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tt_cli.model.sampling.code_choice import Sampling, filter_top_k, filter_top_p, pick

NONE = -torch.inf
# Probabilities 1/2, 1/4, 1/8, 1/8 in a shuffled order.
LOGITS = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()


def kept(filtered: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in filtered]


def test_top_k() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 5.0, -1.0]])
    expected = torch.tensor([[3.0, NONE, 2.0, NONE], [NONE, 5.0, 5.0, NONE]])
    assert torch.equal(filter_top_k(logits, 2), expected)
    assert torch.equal(filter_top_k(logits, 0), logits)
    assert torch.equal(filter_top_k(logits, 4), logits)
    assert torch.equal(filter_top_k(logits, 99), logits)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    assert filter_top_k(torch.zeros(1, 9), 3).isfinite().sum() == 3


def test_top_p_keeps_the_token_that_crosses() -> None:
    assert kept(filter_top_p(LOGITS, 0.4)) == [[1]]
    assert kept(filter_top_p(LOGITS, 0.6)) == [[1, 3]]
    assert kept(filter_top_p(LOGITS, 0.8)) == [[0, 1, 3]]
    assert kept(filter_top_p(LOGITS, 0.99)) == [[0, 1, 2, 3]]
    assert torch.equal(filter_top_p(LOGITS, 1.0), LOGITS)
    assert kept(filter_top_p(LOGITS, 1e-9)) == [[1]]
    assert kept(filter_top_p(torch.zeros(1, 4), 0.5)) == [[0, 1, 2]], "above it, not up to it"


def test_top_p_leaves_kept_logits_alone() -> None:
    filtered = filter_top_p(LOGITS, 0.6)
    assert torch.equal(filtered[0, [1, 3]], LOGITS[0, [1, 3]])


def test_top_p_after_top_k_renormalises() -> None:
    """Of the two kept by top-k, 1/2 and 1/4, the first holds 2/3."""
    two = filter_top_k(LOGITS, 2)
    assert kept(filter_top_p(two, 0.6)) == [[1]]
    assert kept(filter_top_p(two, 0.7)) == [[1, 3]]
    assert close(frequencies(top_k=2, top_p=0.6), [0, 1, 0, 0])


def frequencies(**settings: float | int) -> list[float]:
    """How often each token is drawn with evenly spread numbers."""
    noise = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = Sampling(**settings).choose(LOGITS.expand(20_000, 4), noise)
    return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()


def close(a: list[float], b: list[float]) -> bool:
    return all(math.isclose(x, y, abs_tol=1e-4) for x, y in zip(a, b, strict=True))


def test_sampling_follows_the_distribution() -> None:
    assert close(frequencies(), [0.125, 0.5, 0.125, 0.25])
    assert close(frequencies(top_k=2), [0, 2 / 3, 0, 1 / 3])
    # Temperature 1/2 squares the probabilities: 1, 16, 1 and 4 parts of 22.
    assert close(frequencies(temperature=0.5), [1 / 22, 16 / 22, 1 / 22, 4 / 22])


def test_temperature_after_the_filters_and_before_them() -> None:
    """At temperature 0.5 the first token alone holds 16/22 > 0.6; filtered first, two tokens stay."""
    assert close(frequencies(temperature=0.5, top_p=0.6), [0, 4 / 5, 0, 1 / 5])
    assert close(frequencies(temperature=0.5, top_p=0.6, temperature_first=True), [0, 1, 0, 0])
    # At temperature 2 the probabilities go as the square roots; 0.4 of them are with the first two tokens only.
    parts = [0.125**0.5, 0.5**0.5, 0.125**0.5, 0.25**0.5]
    two = parts[1] + parts[3]
    assert close(frequencies(temperature=2.0, top_p=0.4), [0, 1, 0, 0])
    expected = [0, parts[1] / two, 0, parts[3] / two]
    assert close(frequencies(temperature=2.0, top_p=0.4, temperature_first=True), expected)
    # Top-k keeps the same tokens either way.
    assert close(frequencies(temperature=2.0, top_k=2), expected)
    assert close(frequencies(temperature=2.0, top_k=2, temperature_first=True), expected)


def test_pick_takes_the_first_sum_above_the_number() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    below_one = math.nextafter(1.0, 0.0)
    noise = [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (below_one, 4)]
    for number, expected in noise:
        assert pick(probabilities, torch.tensor([number], dtype=torch.float64)).tolist() == [expected], number
    nothing = torch.full((1, 6), math.nan)
    assert pick(nothing, torch.tensor([0.5], dtype=torch.float64)).tolist() == [5], "an id that there is"


@pytest.mark.parametrize("size", [7, 8192])
def test_pick_never_takes_what_cannot_be(size: int) -> None:
    """Neither with the smallest nor with the largest number, however the sums were rounded."""
    generator = torch.Generator().manual_seed(size)
    probabilities = torch.rand(200, size, generator=generator)
    probabilities *= torch.rand(200, size, generator=generator) < 0.1
    probabilities[:, 3] = 1e-30
    for number in (0.0, math.nextafter(1.0, 0.0)):
        ids = pick(probabilities, torch.full((200,), number, dtype=torch.float64))
        assert (probabilities.gather(1, ids[:, None]) > 0).all()


def test_top_1_is_the_argmax() -> None:
    logits = torch.randn(50, 7)
    for number in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        noise = torch.full((50,), number, dtype=torch.float64)
        assert torch.equal(Sampling(top_k=1).choose(logits, noise), logits.argmax(dim=1))


def test_half_precision_logits() -> None:
    assert Sampling(top_p=0.4).choose(LOGITS.bfloat16(), torch.tensor([0.9])).tolist() == [1]

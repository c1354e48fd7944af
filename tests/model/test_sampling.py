"""Filters and sampling on logits small enough to check by hand."""

from __future__ import annotations

import math

import torch

from tt_cli.model.sampling import filter_top_k, filter_top_p, sample

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
    generator = torch.Generator().manual_seed(0)
    drawn = sample(LOGITS.expand(20_000, 4), generator=generator, **settings)
    return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()


def close(a: list[float], b: list[float]) -> bool:
    return all(math.isclose(x, y, abs_tol=0.015) for x, y in zip(a, b, strict=True))


def test_sampling_follows_the_distribution() -> None:
    assert close(frequencies(), [0.125, 0.5, 0.125, 0.25])
    assert close(frequencies(top_k=2), [0, 2 / 3, 0, 1 / 3])
    # Temperature 1/2 squares the probabilities: 1, 16, 1 and 4 parts of 22.
    assert close(frequencies(temperature=0.5), [1 / 22, 16 / 22, 1 / 22, 4 / 22])


def test_temperature_comes_after_the_filters() -> None:
    """At temperature 0.5 the first token alone would hold 16/22 > 0.6; filtered first, two tokens stay."""
    assert close(frequencies(temperature=0.5, top_p=0.6), [0, 4 / 5, 0, 1 / 5])


def test_top_1_is_the_argmax() -> None:
    logits = torch.randn(50, 7)
    assert torch.equal(sample(logits, top_k=1), logits.argmax(dim=1))


def test_half_precision_logits() -> None:
    assert sample(LOGITS.bfloat16(), top_p=0.4).tolist() == [1]


def test_a_generator_repeats() -> None:
    logits = torch.randn(64, 16)
    draws = [sample(logits, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])

"""The learning rate of the paper's run and of short ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tt_cli.optim.schedule import learning_rate


@dataclass(frozen=True)
class Part:
    total_steps: int
    warmup_fraction: float
    peak_lr: float


PAPER = Part(total_steps=31250, warmup_fraction=0.1, peak_lr=2.5e-3)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 8e-7), (1, 1.6e-6), (1562, 1.2504e-3), (3124, 2.5e-3), (3125, 2.5e-3), (17187, 1.250044e-3)]
    + [(31249, 2.5e-3 / 28125), (31250, 0.0), (40000, 0.0)],
)
def test_the_papers_schedule(step: int, rate: float) -> None:
    assert learning_rate(PAPER, step) == pytest.approx(rate, rel=1e-5)


def test_rises_then_falls_without_a_jump() -> None:
    rates = [learning_rate(PAPER, step) for step in range(31251)]
    assert all(a < b for a, b in zip(rates[:3124], rates[1:3125], strict=True))
    assert all(a > b for a, b in zip(rates[3125:], rates[3126:], strict=False))
    assert max(abs(a - b) for a, b in zip(rates, rates[1:], strict=False)) < 8.1e-7


@pytest.mark.parametrize("fraction", [0.0, 0.001])
def test_no_warm_up_starts_at_the_peak(fraction: float) -> None:
    assert learning_rate(Part(100, fraction, 0.01), 0) == 0.01


def test_a_run_of_warm_up_alone() -> None:
    assert [learning_rate(Part(4, 1.0, 0.4), step) for step in range(6)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.0, 0.0]
    )


def test_refuses_a_negative_step() -> None:
    with pytest.raises(ValueError, match="counts from 0"):
        learning_rate(PAPER, -1)

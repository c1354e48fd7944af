"""The swarm's progress as lines of a screen: bars to the next step and to the run's end, and the loss in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from tt_cli.supervisor.peer_state import LARGEST_LOSS
from tt_cli.terminal.chart import sparkline
from tt_cli.terminal.format import NONE, bar, duration, labelled, loss_value

Curve = Sequence[tuple[int, float]]
"""(step, loss), oldest first."""


def steps_bar(done: int, total: int, left: float | None, width: int) -> Text:
    """Steps done of the whole run; `left`: seconds to its end, None for unknown."""
    words = f" {done:,} of {total:,} steps"
    if left is not None and math.isfinite(left):
        words += f" · {duration(left)} left"
    return labelled("run", bar(done / max(1, total), _room(width, words)), words, width=width)


def next_step_bar(samples: int, target: int, eta: float | None, width: int) -> Text:
    """Samples of the whole swarm towards the next global step; `eta`: seconds to it, None for unknown."""
    words = f" {samples:,} of {target:,} samples"
    if eta is not None and math.isfinite(eta):
        words += f" · in {duration(eta)}"
    done = bar(samples / max(1, target), _room(width, words), "green")
    return labelled("next step", done, words, width=width)


def _room(width: int, words: str) -> int:
    # 40: what the words take as a rule, so that bars below each other are equally long.
    return max(4, min(60, width - 10 - max(40, len(words))))


def loss_line(curve: Curve, width: int) -> Text:
    """The loss as a sparkline with its last, least and largest value."""
    values = [value for _, value in curve if abs(value) < LARGEST_LOSS]
    if not values:
        return labelled("loss", (NONE, "dim"), width=width)
    words = f"  last {loss_value(values[-1])}  min {loss_value(min(values))}  max {loss_value(max(values))}"
    room = max(4, min(60, width - 10 - len(words)))
    return labelled("loss", (sparkline(values, room), "cyan"), words, width=width)

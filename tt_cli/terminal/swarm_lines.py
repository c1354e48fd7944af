"""Progress on a screen: bars to the next step and to the run's end, the loss in a line, inner steps, bytes an hour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from tt_cli.supervisor.peer_state import LARGEST_LOSS
from tt_cli.terminal.chart import sparkline
from tt_cli.terminal.format import NONE, bar, byte_count, duration, labelled, loss_value, plural

Curve = Sequence[tuple[int, float]]
"""(step, loss), oldest first."""


def steps_bar(done: int, total: int, left: float | None, width: int) -> Text:
    """Steps done of the whole run; `left`: seconds to its end, None for unknown."""
    more = "" if left is None or not math.isfinite(left) else f" · {duration(left)} left"
    return progress_bar("run", done / max(1, total), f" {done:,} of {total:,} steps{more}", width)


def next_step_bar(samples: int, target: int, eta: float | None, width: int) -> Text:
    """Samples of the whole swarm towards the next global step; `eta`: seconds to it, None for unknown."""
    more = "" if eta is None or not math.isfinite(eta) else f" · in {duration(eta)}"
    words = f" {samples:,} of {target:,} samples{more}"
    return progress_bar("next step", samples / max(1, target), words, width, "green")


def progress_bar(label: str, fraction: float, words: str, width: int, style: str = "cyan") -> Text:
    """A labelled bar with words behind it; bars below each other are equally long where the words leave 40 cells."""
    room = max(4, min(60, width - 10 - max(40, len(words))))
    return labelled(label, bar(fraction, room, style), words, width=width)


def loss_line(curve: Curve, width: int) -> Text:
    """The loss as a sparkline with its last, least and largest value."""
    values = [value for _, value in curve if abs(value) < LARGEST_LOSS]
    if not values:
        return labelled("loss", (NONE, "dim"), width=width)
    words = f"  last {loss_value(values[-1])}  min {loss_value(min(values))}  max {loss_value(max(values))}"
    room = max(4, min(60, width - 10 - len(words)))
    return labelled("loss", (sparkline(values, room), "cyan"), words, width=width)


def inner_steps(made: int, due: int | None) -> str:
    """Inner steps made of those that make a global one: 7 of 20 inner steps; due: None for unknown."""
    return plural(made, "inner step") if due is None else f"{made:,} of {plural(due, 'inner step')}"


def hourly(up: float, down: float, before: str = " · ") -> str:
    """Bytes an hour, after `before`; "" where none are known."""
    return f"{before}{byte_count(up)} up and {byte_count(down)} down an hour" if up or down else ""

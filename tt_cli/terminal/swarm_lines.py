"""The swarm as lines on a screen, from the JSON form of a monitor snapshot (`tt monitor --json`).

The aux peer's screen and `tt monitor` draw the same thing; the former gets it as an event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tt_cli.supervisor.peer_state import LARGEST_LOSS
from tt_cli.terminal.chart import line_chart
from tt_cli.terminal.format import (
    NONE,
    Column,
    bar,
    clean,
    duration,
    fit,
    labelled,
    loss_value,
    percent,
    plural,
    rate,
    short_digest,
    short_id,
    sparkline,
    table,
)

Curve = Sequence[tuple[int, float]]
"""(step, loss), oldest first."""

PEER_COLUMNS = (
    Column("peer", 14, 24, 9),
    Column("role", 4, 9, 4),
    Column("device", 12, 24, 1),
    Column("samples/s", 9, 9, 8, right=True),
    Column("share", 5, 5, 7, right=True),
    Column("lag", 3, 6, 6, right=True),
    Column("state", 7, 7, 5),
    Column("last round", 16, 60, 3),
    Column("age", 4, 10, 2, right=True),
)


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


def run_seconds_left(swarm: Mapping[str, Any]) -> float | None:
    """Seconds to the run's last step at the present rate, None for unknown."""
    steps, per_second = swarm["total_steps"] - swarm["epoch"], swarm["samples_per_second"]
    if steps <= 0 or swarm["eta_s"] is None or not per_second:
        return None
    seconds: float = swarm["eta_s"] + (steps - 1) * swarm["target_batch_size"] / per_second
    return seconds


def peer_name(peer: Mapping[str, Any]) -> str:
    """User and end of the peer id; a long user name is cut, so that the id is seen."""
    user = fit(Text(clean(peer["user"])), 14).plain
    return f"{user} {short_id(peer['peer_id'])}" if user else short_id(peer["peer_id"])


def peers_table(peers: Sequence[Mapping[str, Any]], width: int, height: int) -> list[Text]:
    """A heading and the peers, at most `height` lines; what does not fit is counted in the last line."""
    if height < 2 or not peers:
        return []
    shown = list(peers if len(peers) < height else peers[: height - 2])
    lines = table(PEER_COLUMNS, [_peer_cells(peer) for peer in shown], width)
    if len(shown) < len(peers):
        lines.append(fit(Text(f"and {plural(len(peers) - len(shown), 'more peer')}", style="dim"), width))
    return lines


def _peer_cells(peer: Mapping[str, Any]) -> list[Text]:
    trains = peer["role"] == "trainer"
    state = ("same", "green") if peer["in_agreement"] else ("differs", "bold red")
    if not peer["digest"]:
        state = (NONE, "dim")
    return [
        Text(peer_name(peer), style="bold" if trains else ""),
        Text(clean(peer["role"]), style="dim"),
        Text(clean(peer["device"])),
        Text(rate(peer["samples_per_second"]) if trains else NONE),
        Text(percent(peer["share"]) if trains else NONE),
        Text(f"{peer['lag']:,}", style="yellow" if peer["lag"] else ""),
        Text(*state),
        Text(clean(peer["round"])),
        Text(duration(peer["age_s"]), style="yellow" if peer["age_s"] > 60 else "dim"),
    ]


def swarm_lines(swarm: Mapping[str, Any], curve: Curve, width: int, height: int) -> list[Text]:
    """The swarm in at most `height` lines: figures, bars, loss curve, peers. The curve gives way to peers."""
    peers = swarm["peers"]
    helpers = sum(peer["role"] == "aux" for peer in peers)
    others = f", {plural(helpers, 'aux peer')}" if helpers else ""
    head = [
        labelled(
            "swarm",
            (plural(swarm["trainers"], "trainer"), "bold" if swarm["trainers"] else "yellow"),
            f"{others} · {rate(swarm['samples_per_second'])} samples/s",
            f" · loss {loss_value(swarm['loss'])} · digest {short_digest(swarm['digest'])}",
            width=width,
        ),
        next_step_bar(swarm["samples"], swarm["target_batch_size"], swarm["eta_s"], width),
        steps_bar(swarm["epoch"], swarm["total_steps"], run_seconds_left(swarm), width),
    ]
    rest = height - len(head)
    curve_rows = min(12, rest - min(len(peers) + 1, 8) - 3)
    lines = [*head]
    if curve_rows >= 3 and len(curve) > 1:
        lines += [Text(""), *line_chart(curve, width, curve_rows + 1)]
    else:
        lines.insert(1, loss_line(curve, width))
    if len(lines) + 2 < height:
        lines += [Text(""), *peers_table(peers, width, height - len(lines) - 1)]
    return lines[:height]

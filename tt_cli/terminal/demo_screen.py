"""The screen of `tt demo`: several workers side by side, one row each, and the swarm's one loss and steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.terminal.format import NONE, PHASE_STYLES, clean, left_right, percent, rate, short_digest
from tt_cli.terminal.live_view import LiveScreen, clock
from tt_cli.terminal.log_lines import LogLine, LogLines
from tt_cli.terminal.swarm_lines import loss_line, next_step_bar, steps_bar
from tt_cli.terminal.table import Column, table
from tt_cli.terminal.worker_screen import LOG_LINES, page

TOLD = ("phase", "round", "synchronised", "contributed", "failure", "finished", "warning", "error", "trouble")
"""Lines shown of every worker; steps are shown of the leader alone."""


class DemoScreen(LiveScreen):
    """Shows the events of several workers. `show` and `say` may be called from any thread.

    On a terminal a live view, elsewhere plain lines that begin with the worker's name; with `json` nothing. The loss,
    the steps and the bars are those of the leader: the first worker that makes a step, and after it has ended the next
    one that does. form: as LiveScreen's.
    """

    def __init__(self, title: str, identity: str, total_steps: int, **form: Any) -> None:
        super().__init__(title, identity, **form)
        self.states: dict[str, PeerState] = {}
        self._total_steps = total_steps
        self._leader: str | None = None
        self._curve: list[tuple[int, float]] = []
        self._lines, self._log = defaultdict[str, LogLines](LogLines), deque[LogLine](maxlen=LOG_LINES)

    def show(self, name: str, event: events.Event) -> None:
        """Take in one event of the worker called `name`; its row appears with its first event."""
        with self.lock:
            state = self.states.setdefault(name, self._new_state())
            state.apply(event)
            if isinstance(event, events.Step):
                if self._leader is None or self.states[self._leader].ended:
                    self._leader = name
                newer = not self._curve or event.epoch > self._curve[-1][0]
                if name == self._leader and newer and event.loss is not None:
                    self._curve.append((event.epoch, event.loss))
            line = self._lines[name].of(event, state)
            if line is None or not (line.word in TOLD or (line.word == "step" and name == self._leader)):
                return
            if line.word not in ("phase", "step"):
                self._log.append(replace(line, text=f"{name}: {line.text}"))
            self._tell(line.at, name, str(line))

    def say(self, message: str) -> None:
        """A line of the demo's own, about what it does next."""
        line = LogLine(time.time(), "demo", clean(message))
        with self.lock:
            self._log.append(line)
            self._tell(line.at, "demo", line.text)

    def frame(self, width: int, height: int, now: float) -> list[Text]:
        """The live view."""
        # the leader; before there is one, any worker that tells its progress
        telling = (state for state in self.states.values() if state.samples is not None)
        front = self.states[self._leader] if self._leader is not None else next(telling, self._new_state())
        body = [loss_line(self._curve or front.losses(), width)]
        if front.samples is not None and front.target_samples is not None:
            body.append(next_step_bar(front.samples, front.target_samples, front.seconds_to_step(now), width))
        body += [steps_bar(front.step or 0, self._total_steps, front.steps_seconds_left(), width), Text("")]
        body += table(COLUMNS, list(self.states.items()), width)
        return page([left_right(*self.titles, width)], body, list(self._log), width, height)

    def _new_state(self) -> PeerState:
        return PeerState(run="", identity="", total_steps=self._total_steps)

    def _tell(self, at: float, name: str, text: str) -> None:
        if self.mode == "plain":
            self.write(f"{clock(at)} {name:<6} {text}")


def _words(state: PeerState) -> str:
    if state.round is not None and state.state in ("training", "averaging"):
        return clean(state.last_round)
    if not state.reason and state.saved_step is not None:
        return f"step {state.saved_step:,} saved"
    return clean(state.reason)


def _known(write: Callable[[float], str], value: float | None) -> str:
    return NONE if value is None else write(value)


DemoRow = tuple[str, PeerState]
COLUMNS: Sequence[Column[DemoRow]] = (
    Column("peer", 4, 12, 9, lambda row: Text(row[0], style="bold")),
    Column("phase", 8, 10, 8, lambda row: Text(clean(row[1].state), style=PHASE_STYLES.get(row[1].state, "bold"))),
    Column("samples/s", 9, 9, 7, lambda row: _known(rate, row[1].samples_per_second), right=True),
    Column("share", 5, 5, 6, lambda row: _known(percent, row[1].share), right=True),
    Column("step", 4, 8, 4, lambda row: _known("{:,}".format, row[1].step), right=True),
    Column("digest", 8, 8, 3, lambda row: short_digest(row[1].digest)),
    Column("last round", 12, 60, 5, lambda row: _words(row[1])),
)

"""The screen of `tt demo`: several workers side by side, one row each, and the swarm's one loss and steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.terminal.format import (
    NONE,
    PHASE_STYLES,
    clean,
    left_right,
    percent,
    rate,
    short_digest,
)
from tt_cli.terminal.live_view import LiveScreen, clock, write_line
from tt_cli.terminal.log_lines import LogLine, LogLines
from tt_cli.terminal.swarm_lines import loss_line, next_step_bar, steps_bar
from tt_cli.terminal.table import Column, table
from tt_cli.terminal.worker_screen import LOG_LINES, page

TOLD = ("phase", "round", "synchronised", "contributed", "failure", "finished", "warning", "error", "trouble")
"""Lines shown of every worker; steps are shown of the leader alone."""


@dataclass
class DemoView:
    """The states of several workers.

    The loss, the steps and the bars are those of the leader: the first worker that makes a step, and after
    it has ended the next one that does.
    """

    total_steps: int
    states: dict[str, PeerState] = field(default_factory=dict)
    leader: str | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    _lines: dict[str, LogLines] = field(default_factory=lambda: defaultdict(LogLines))

    def apply(self, name: str, event: events.Event) -> list[LogLine]:
        """Take in one event of the worker `name`; return what it is worth telling."""
        state = self.states.setdefault(name, PeerState(run="", identity="", total_steps=self.total_steps))
        state.apply(event)
        if isinstance(event, events.Step):
            if self.leader is None or self.states[self.leader].ended:
                self.leader = name
            newer = not self.curve or event.epoch > self.curve[-1][0]
            if name == self.leader and newer and event.loss is not None:
                self.curve.append((event.epoch, event.loss))
        lines = self._lines[name].of(event, state)
        shown = [line for line in lines if line.word in TOLD or (line.word == "step" and name == self.leader)]
        for line in shown:
            if line.word not in ("phase", "step"):
                self.log.append(LogLine(line.at, line.word, f"{name}: {line.text}", line.level))
        return shown

    def front(self) -> PeerState:
        """The leader's state; before there is a leader, that of any worker that tells its progress."""
        if self.leader is not None:
            return self.states[self.leader]
        training = (state for state in self.states.values() if state.samples is not None)
        return next(training, PeerState(run="", identity="", total_steps=self.total_steps))


class DemoScreen(LiveScreen):
    """Shows the events of several workers. `show` and `say` may be called from any thread.

    On a terminal a live view, elsewhere plain lines that begin with the worker's name.
    """

    def __init__(
        self, title: str, identity: str, total_steps: int, *, plain: bool = False, stream: TextIO | None = None
    ) -> None:
        super().__init__(plain=plain, stream=stream)
        self.view = DemoView(total_steps)
        self._titles = (title, identity)

    def show(self, name: str, event: events.Event) -> None:
        """Take in one event of the worker called `name`; its row appears with its first event."""
        with self.lock:
            for line in self.view.apply(name, event):
                self._tell(name, line)

    def say(self, message: str) -> None:
        """A line of the demo's own, about what it does next."""
        line = LogLine(time.time(), "demo", clean(message))
        with self.lock:
            self.view.log.append(line)
            self._tell("demo", LogLine(line.at, "", line.text))

    def frame(self, width: int, height: int) -> list[Text]:
        """The live view."""
        return draw(self.view, self._titles, width, height, now=time.time())

    def _tell(self, name: str, line: LogLine) -> None:
        if self.mode == "plain":
            write_line(self.stream, f"{clock(line.at)} {name:<6} {str(line).strip()}")


def draw(view: DemoView, titles: tuple[str, str], width: int, height: int, *, now: float) -> list[Text]:
    """The live view as at most `height` lines of at most `width` cells.

    titles: what stands at the left and at the right of the first line. now: Unix seconds.
    """
    front = view.front()
    head = [left_right(Text(titles[0], style="bold"), Text(titles[1], style="dim"), width)]
    body = [loss_line(view.curve or front.losses(), width)]
    if front.samples is not None and front.target_samples is not None:
        body.append(next_step_bar(front.samples, front.target_samples, front.seconds_to_step(now), width))
    body.append(steps_bar(front.step or 0, view.total_steps, front.steps_seconds_left(), width))
    body.append(Text(""))
    body += table(COLUMNS, list(view.states.items()), width)
    return page(head, body, list(view.log), width, height)


def _words(state: PeerState) -> str:
    if state.round is not None and state.state in ("training", "averaging"):
        return clean(state.last_round)
    if not state.reason and state.saved_step is not None:
        return f"step {state.saved_step:,} saved"
    return clean(state.reason)


def _phase(row: DemoRow) -> Text:
    return Text(clean(row[1].state), style=PHASE_STYLES.get(row[1].state, "bold"))


def _known(write: Callable[[float], str], value: float | None) -> str:
    return NONE if value is None else write(value)


DemoRow = tuple[str, PeerState]
COLUMNS: Sequence[Column[DemoRow]] = (
    Column("peer", 4, 12, 9, lambda row: Text(row[0], style="bold")),
    Column("phase", 8, 10, 8, _phase),
    Column("samples/s", 9, 9, 7, lambda row: _known(rate, row[1].samples_per_second), right=True),
    Column("share", 5, 5, 6, lambda row: _known(percent, row[1].share), right=True),
    Column("step", 4, 8, 4, lambda row: _known("{:,}".format, row[1].step), right=True),
    Column("digest", 8, 8, 3, lambda row: short_digest(row[1].digest)),
    Column("last round", 12, 60, 5, lambda row: _words(row[1])),
)

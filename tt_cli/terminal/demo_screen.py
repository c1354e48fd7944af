"""The screen of `tt demo`: several workers side by side, one row each, and the swarm's one loss and steps."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.terminal.format import (
    NONE,
    PHASE_STYLES,
    Column,
    clean,
    left_right,
    percent,
    rate,
    short_digest,
    table,
)
from tt_cli.terminal.live_view import LiveView, clock, output_mode, write_line
from tt_cli.terminal.peer_view import LogLine, WorkerView
from tt_cli.terminal.swarm_lines import loss_line, next_step_bar, steps_bar
from tt_cli.terminal.worker_screen import LOG_LINES, page

COLUMNS = (
    Column("peer", 4, 12, 9),
    Column("phase", 8, 10, 8),
    Column("samples/s", 9, 9, 7, right=True),
    Column("share", 5, 5, 6, right=True),
    Column("step", 4, 8, 4, right=True),
    Column("digest", 8, 8, 3),
    Column("last round", 12, 60, 5),
)
TOLD = ("phase", "round", "synchronised", "contributed", "failure", "finished", "warning", "error", "trouble")
"""Lines told of every worker; steps are told of the leader alone."""


@dataclass
class DemoView:
    """The state of several workers.

    The loss, the steps and the bars are those of the leader: the first worker that makes a step, and after
    it has ended the next one that does.
    """

    total_steps: int
    views: dict[str, WorkerView] = field(default_factory=dict)
    leader: str | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    def fold(self, name: str, event: events.Event) -> list[LogLine]:
        """Take in one event of the worker `name`; return what it is worth telling."""
        view = self.views.setdefault(name, WorkerView(self.total_steps))
        lines = view.fold(event)
        if isinstance(event, events.Step):
            if self.leader is None or self.views[self.leader].ended:
                self.leader = name
            newer = not self.curve or event.epoch > self.curve[-1][0]
            if name == self.leader and newer and event.loss is not None:
                self.curve.append((event.epoch, event.loss))
        told = [line for line in lines if line.word in TOLD or (line.word == "step" and name == self.leader)]
        for line in told:
            if line.word not in ("phase", "step"):
                self.log.append(LogLine(line.at, line.word, f"{name}: {line.text}", line.level))
        return told

    def front(self) -> WorkerView:
        """The leader's view; before there is a leader, that of any worker that tells its progress."""
        if self.leader is not None:
            return self.views[self.leader]
        training = (view for view in self.views.values() if view.progress is not None)
        return next(training, WorkerView(self.total_steps))


class DemoScreen:
    """Shows the events of several workers; a context manager. `show` and `say` may be called from any thread.

    On a terminal a live view, elsewhere plain lines that begin with the worker's name.
    """

    def __init__(
        self,
        title: str,
        identity: str,
        total_steps: int,
        *,
        plain: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.mode = output_mode(stream or sys.stdout, plain=plain)
        self.view = DemoView(total_steps)
        self._titles = (title, identity)
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._open = ExitStack()

    def __enter__(self) -> DemoScreen:
        if self.mode == "live":
            self._open.enter_context(LiveView(self._stream, self._frame))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def show(self, name: str, event: events.Event) -> None:
        """Take in one event of the worker called `name`; its row appears with its first event."""
        with self._lock:
            for line in self.view.fold(name, event):
                self._tell(name, line)

    def say(self, message: str) -> None:
        """A line of the demo's own, about what it does next."""
        line = LogLine(time.time(), "demo", clean(message))
        with self._lock:
            self.view.log.append(line)
            self._tell("demo", LogLine(line.at, "", line.text))

    def _tell(self, name: str, line: LogLine) -> None:
        if self.mode == "plain":
            write_line(self._stream, f"{clock(line.at)} {name:<6} {str(line).strip()}")

    def _frame(self, width: int, height: int) -> list[Text]:
        with self._lock:
            return draw(self.view, self._titles, width, height, now=time.time())


def draw(view: DemoView, titles: tuple[str, str], width: int, height: int, *, now: float) -> list[Text]:
    """The live view as at most `height` lines of at most `width` cells.

    titles: what stands at the left and at the right of the first line. now: Unix seconds.
    """
    front = view.front()
    head = [left_right(Text(titles[0], style="bold"), Text(titles[1], style="dim"), width)]
    body = [loss_line(view.curve or front.losses(), width)]
    progress = front.progress
    if progress is not None:
        eta = front.eta(now)
        body.append(next_step_bar(progress.samples, progress.target_samples, eta, width))
    body.append(steps_bar(front.epoch or 0, view.total_steps, front.steps_seconds_left(), width))
    body.append(Text(""))
    body += table(COLUMNS, [_cells(name, one) for name, one in view.views.items()], width)
    return page(head, body, list(view.log), width, height)


def _cells(name: str, view: WorkerView) -> list[Text]:
    progress = None if view.ended else view.progress
    words = view.reason
    if view.round is not None and view.phase in ("training", "averaging"):
        words = view.round.words or view.round.outcome
    elif not words and view.saved is not None:
        words = f"step {view.saved:,} saved"
    return [
        Text(name, style="bold"),
        Text(view.phase, style=PHASE_STYLES.get(view.phase, "bold")),
        Text(rate(progress.my_samples_per_second) if progress else NONE),
        Text(percent(progress.my_share) if progress else NONE),
        Text(NONE if view.epoch is None else f"{view.epoch:,}"),
        Text(short_digest(view.digest)),
        Text(clean(words)),
    ]

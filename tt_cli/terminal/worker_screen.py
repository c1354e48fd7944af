"""The screen of one worker: `tt join`, and `tt aux-peer`, whose events carry snapshots of the swarm.

On a terminal a live view; elsewhere one plain line for each thing worth telling; with `json` the events
themselves. The state is `peer.view.View`; here it is only drawn.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import TextIO

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.terminal.format import (
    LEVEL_STYLES,
    NONE,
    PHASE_STYLES,
    bar,
    byte_count,
    clean,
    duration,
    fit,
    labelled,
    left_right,
    percent,
    plural,
    rate,
    short_digest,
    short_id,
)
from tt_cli.terminal.live_view import LiveView, clock, output_mode, write_line
from tt_cli.terminal.peer_view import LogLine, WorkerView, download_words, join_line
from tt_cli.terminal.swarm_lines import loss_line, next_step_bar, steps_bar, swarm_lines

HINT = "Ctrl-C leaves cleanly; again at once"
LOG_LINES = 12
_DRAWN = ("phase", "step", "progress", "swarm", "listening", "download")
"""Lines whose content the live view draws anyway: they do not go into its log."""


class Screen:
    """Shows the events of one worker; a context manager. `show` may be called from any thread.

    title: the command and run, such as "tt join emoji". identity: the run's. join_run: the run as others
    name it; where it is given, the line with which others join through this peer is shown. plain, json:
    force that form. A `Failure` is not printed as a line: the command line says it on stderr.
    """

    def __init__(
        self,
        title: str,
        identity: str,
        total_steps: int,
        *,
        join_run: str | None = None,
        plain: bool = False,
        json: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.mode = output_mode(stream or sys.stdout, plain=plain, json=json)
        self.view = WorkerView(total_steps)
        self._titles, self._join_run = (title, identity), join_run
        self._stream = stream or sys.stdout
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._lock = threading.Lock()
        self._live: LiveView | None = None
        self._open = ExitStack()

    def __enter__(self) -> Screen:
        if self.mode == "live":
            self._live = self._open.enter_context(LiveView(self._stream, self._frame))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live = None
        self._open.close()

    def show(self, event: events.Event) -> None:
        """Take one event in and, where it is worth telling, tell it."""
        invitation = None
        if isinstance(event, events.Listening) and self._join_run is not None and not event.client_mode:
            invitation = join_line(self._join_run, event.addresses)
        with self._lock:
            lines = self.view.fold(event)
            self._keep([line for line in lines if line.word not in _DRAWN])
            if self.mode == "json":
                write_line(self._stream, event.to_json())
            elif self.mode == "plain":
                if invitation is not None:
                    lines.append(LogLine(event.at, "join", invitation))
                for line in lines:
                    if line.word != "failure":
                        write_line(self._stream, f"{clock(line.at)} {line}")
        if self._live is not None and invitation is not None:
            self._live.print_above(invitation)

    def _keep(self, lines: list[LogLine]) -> None:
        if any(line.word == "saved" for line in lines):  # only the newest checkpoint matters
            for old in [line for line in self._log if line.word == "saved"]:
                self._log.remove(old)
        self._log.extend(lines)

    def _frame(self, width: int, height: int) -> list[Text]:
        with self._lock:
            return draw(self.view, list(self._log), self._titles, width, height, now=time.time())


def draw(
    view: WorkerView, log: list[LogLine], titles: tuple[str, str], width: int, height: int, *, now: float
) -> list[Text]:
    """The live view of one worker as at most `height` lines of at most `width` cells.

    titles: what stands at the left and at the right of the first line. now: Unix seconds.
    """
    top = left_right(Text(titles[0], style="bold"), Text(titles[1], style="dim"), width)
    head = [top, phase_line(view, now, width)]
    if view.swarm is not None:
        room = max(3, height - len(head) - 3 - min(len(log), max(2, height // 6)))
        body = swarm_lines(view.swarm, view.losses(), width, room)
    else:
        body = _peer_lines(view, now, width)
    return page(head, body, log, width, height)


def page(head: list[Text], body: list[Text], log: list[LogLine], width: int, height: int) -> list[Text]:
    """Head, body, log and key hint, with empty lines between them as far as there is room."""
    foot = [fit(Text(HINT, style="dim"), width)]
    room = height - len(head) - len(body) - len(foot)
    gap = [Text("")]
    gaps = min(3, max(0, room))
    last = [log_line(line, width) for line in log][max(0, len(log) - max(0, room - gaps)) :]
    lines = [*head, *gap * (gaps > 0), *body, *gap * (gaps > 1), *last]
    lines += [*gap * (gaps > 2 and bool(last)), *foot]
    return lines if len(lines) <= height else [*lines[: height - 1], *foot]


def phase_line(view: WorkerView, now: float, width: int) -> Text:
    """The phase in its colour, how long it has lasted, and why."""
    text = Text(view.phase, style=PHASE_STYLES.get(view.phase, "bold"))
    if view.phase_since is not None:
        text.append(f" for {duration(now - view.phase_since)}", style="dim")
    if view.reason:
        text.append(f" · {view.reason}")
    return fit(text, width)


def log_line(line: LogLine, width: int) -> Text:
    """One line of the log as the live view shows it."""
    text = Text.assemble((f"{clock(line.at)}  ", "dim"), (line.text, LEVEL_STYLES[line.level]))
    return fit(text, width)


def _peer_lines(view: WorkerView, now: float, width: int) -> list[Text]:
    progress = view.progress
    lines = [loss_line(view.losses(), width)]
    if view.download is not None:
        words = f" {download_words(view.download)}"
        done = view.download.received / max(1, view.download.total)
        room = max(4, min(60, width - 10 - max(40, len(words))))
        lines.append(labelled("state", bar(done, room, "blue"), words, width=width))
    elif progress is not None:
        lines.append(next_step_bar(progress.samples, progress.target_samples, view.eta(now), width))
    else:
        lines.append(labelled("next step", bar(0, max(4, min(60, width - 50))), width=width))
    lines.append(steps_bar(view.epoch or 0, view.total_steps, view.steps_seconds_left(), width))
    lines.append(Text(""))
    if progress is not None:
        lines += [
            labelled(
                "swarm",
                (plural(progress.peers, "peer"), "bold"),
                f" · {rate(progress.swarm_samples_per_second)} samples/s",
                width=width,
            ),
            labelled(
                "this peer",
                (f"{rate(progress.my_samples_per_second)} samples/s", "bold"),
                f" · {percent(progress.my_share)} of the swarm",
                f" · {plural(progress.my_samples, 'sample')} so far",
                width=width,
            ),
            labelled(
                "traffic",
                f"sent {byte_count(progress.bytes_sent)} · received {byte_count(progress.bytes_received)}",
                width=width,
            ),
        ]
        if progress.rejected_micro_batches:
            words = f"{plural(progress.rejected_micro_batches, 'micro-batch')} thrown away: not finite"
            lines.append(labelled("rejected", (words, "yellow"), width=width))
    if view.troubles:
        counts = ", ".join(f"{clean(what)} {count:,}" for what, count in sorted(view.troubles.items()))
        lines.append(labelled("troubles", (counts, "yellow"), width=width))
    lines.append(labelled("averaging", *_round_words(view, width - 10), width=width))
    lines.append(labelled("weights", _weights_words(view), width=width))
    return lines


def _round_words(view: WorkerView, room: int) -> list[str | tuple[str, str]]:
    made = view.round
    if made is None:
        return [(NONE, "dim")]
    bad = made.outcome not in ("committed", "alone") or bool(made.rejected)
    words = clean(made.words) or clean(made.outcome)
    parts = [f"{clean(part)} {value:.1f} s" for part, value in made.seconds.items() if part != "whole"]
    whole = made.seconds.get("whole", math.fsum(made.seconds.values()))
    seconds = f" · {whole:.1f} s" + (f": {', '.join(parts)}" if parts else "")
    if len(words) + len(seconds) > room:
        seconds = f" · {whole:.1f} s"
    return [(words, "yellow" if bad else "green"), (seconds if made.seconds else "", "dim")]


def _weights_words(view: WorkerView) -> str:
    words = f"digest {short_digest(view.digest)}"
    if view.saved is not None:
        words += f" · step {view.saved:,} saved"
    if view.peer_id:
        words += f" · peer {short_id(view.peer_id)}" + (" (client mode)" if view.client_mode else "")
    return words

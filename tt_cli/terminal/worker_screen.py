"""The screen of one worker: `tt join`, and `tt aux-peer`, whose events carry snapshots of the swarm.

On a terminal a live view; elsewhere one plain line for each thing worth telling; with `json` the events
themselves. The state is a `PeerState`; here it is only drawn.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState
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
from tt_cli.terminal.live_view import LiveScreen, clock, write_line
from tt_cli.terminal.log_lines import LogLine, LogLines, download_words, join_line
from tt_cli.terminal.swarm_lines import Curve, loss_line, next_step_bar, steps_bar

HINT = "Ctrl-C leaves cleanly; again at once"
LOG_LINES = 12
DrawSwarm = Callable[[Mapping[str, Any], Curve, int, int], list[Text]]
"""A snapshot's JSON, a loss curve, width and height → at most so many lines of at most so many cells."""
_DRAWN = ("phase", "step", "progress", "swarm", "listening", "download")
"""Lines whose content the live view draws anyway: they do not go into its log."""


class Screen(LiveScreen):
    """Shows the events of one worker. `show` may be called from any thread.

    title: the command and run, such as "tt join emoji". identity: the run's. join_run: the run as others
    name it; where it is given, the line with which others join through this peer is shown. draw_swarm: of a worker that
    tells of the whole swarm. A `Failure` is not printed as a line: the command line says it on stderr.
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
        draw_swarm: DrawSwarm | None = None,
    ) -> None:
        super().__init__(plain=plain, json=json, stream=stream)
        self._draw_swarm = draw_swarm
        self.state = PeerState(run=title, identity=identity, total_steps=total_steps)
        self._titles, self._join_run = (title, identity), join_run
        self._lines, self._log = LogLines(), deque[LogLine](maxlen=LOG_LINES)

    def show(self, event: events.Event) -> None:
        """Take one event in and, where it is worth telling, tell it."""
        invitation = None
        if isinstance(event, events.Listening) and self._join_run is not None and not event.client_mode:
            invitation = join_line(self._join_run, [clean(address) for address in event.addresses])
        with self.lock:
            self.state.apply(event)
            lines = self._lines.of(event, self.state)
            self._keep([line for line in lines if line.word not in _DRAWN])
            if self.mode == "json":
                write_line(self.stream, event.to_json())
            elif self.mode == "plain":
                if invitation is not None:
                    lines.append(LogLine(event.at, "join", invitation))
                for line in lines:
                    if line.word != "failure":
                        write_line(self.stream, f"{clock(line.at)} {line}")
        if self.live is not None and invitation is not None:
            self.live.print_above(invitation)

    def _keep(self, lines: list[LogLine]) -> None:
        if any(line.word == "saved" for line in lines):  # only the newest checkpoint matters
            for old in [line for line in self._log if line.word == "saved"]:
                self._log.remove(old)
        self._log.extend(lines)

    def frame(self, width: int, height: int) -> list[Text]:
        """The live view."""
        log, now = list(self._log), time.time()
        return draw(self.state, log, self._titles, width, height, now=now, draw_swarm=self._draw_swarm)


def draw(
    state: PeerState,
    log: list[LogLine],
    titles: tuple[str, str],
    width: int,
    height: int,
    *,
    now: float,
    draw_swarm: DrawSwarm | None = None,
) -> list[Text]:
    """The live view of one worker as at most `height` lines of at most `width` cells.

    titles: what stands at the left and at the right of the first line. now: Unix seconds.
    """
    top = left_right(Text(titles[0], style="bold"), Text(titles[1], style="dim"), width)
    head = [top, phase_line(state, now, width)]
    if state.swarm is not None and draw_swarm is not None:
        room = max(3, height - len(head) - 3 - min(len(log), max(2, height // 6)))
        body = draw_swarm(state.swarm, state.losses(), width, room)
    else:
        body = _peer_lines(state, now, width)
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


def phase_line(state: PeerState, now: float, width: int) -> Text:
    """The phase in its colour, how long it has lasted, and why."""
    text = Text(clean(state.state), style=PHASE_STYLES.get(state.state, "bold"))
    text.append(f" for {duration(now - state.since)}", style="dim")
    if state.reason:
        text.append(f" · {clean(state.reason)}")
    return fit(text, width)


def log_line(line: LogLine, width: int) -> Text:
    """One line of the log as the live view shows it."""
    text = Text.assemble((f"{clock(line.at)}  ", "dim"), (line.text, LEVEL_STYLES[line.level]))
    return fit(text, width)


def _peer_lines(state: PeerState, now: float, width: int) -> list[Text]:
    lines = [loss_line(state.losses(), width)]
    if state.download is not None:
        words = f" {download_words(state.download)}"
        done = state.download.received / max(1, state.download.total)
        room = max(4, min(60, width - 10 - max(40, len(words))))
        lines.append(labelled("state", bar(done, room, "blue"), words, width=width))
    elif state.samples is not None and state.target_samples is not None:
        lines.append(next_step_bar(state.samples, state.target_samples, state.seconds_to_step(now), width))
    else:
        lines.append(labelled("next step", bar(0, max(4, min(60, width - 50))), width=width))
    lines.append(steps_bar(state.step or 0, state.total_steps, state.steps_seconds_left(), width))
    lines.append(Text(""))
    if state.samples is not None:
        figures: list[tuple[str, list[str | tuple[str, str]]]] = [
            ("swarm", [(plural(state.peers or 0, "peer"), "bold"), f" · {_rate(state.swarm_samples_per_second)}"]),
            (
                "this peer",
                [
                    (_rate(state.samples_per_second), "bold"),
                    f" · {percent(state.share or 0.0)} of the swarm · {plural(state.my_samples, 'sample')} so far",
                ],
            ),
            ("traffic", [f"sent {byte_count(state.bytes_sent)} · received {byte_count(state.bytes_received)}"]),
        ]
        if state.rejected_micro_batches:
            words = f"{plural(state.rejected_micro_batches, 'micro-batch')} thrown away: not finite"
            figures.append(("rejected", [(words, "yellow")]))
        lines += [labelled(label, *parts, width=width) for label, parts in figures]
    if state.troubles:
        counts = ", ".join(f"{clean(what)} {trouble.count:,}" for what, trouble in sorted(state.troubles.items()))
        lines.append(labelled("troubles", (counts, "yellow"), width=width))
    lines.append(labelled("averaging", *_round_words(state.round, width - 10), width=width))
    lines.append(labelled("weights", _weights_words(state), width=width))
    return lines


def _rate(samples: float | None) -> str:
    return f"{rate(samples or 0.0)} samples/s"


def _round_words(made: events.Round | None, room: int) -> list[str | tuple[str, str]]:
    if made is None:
        return [(NONE, "dim")]
    bad = made.outcome not in events.STEPPED or bool(made.rejected)
    words = clean(made.words) or clean(made.outcome)
    parts = [f"{clean(part)} {value:.1f} s" for part, value in made.seconds.items() if part != "whole"]
    whole = made.seconds.get("whole", math.fsum(made.seconds.values()))
    seconds = f" · {whole:.1f} s" + (f": {', '.join(parts)}" if parts else "")
    if len(words) + len(seconds) > room:
        seconds = f" · {whole:.1f} s"
    return [(words, "yellow" if bad else "green"), (seconds if made.seconds else "", "dim")]


def _weights_words(state: PeerState) -> str:
    words = f"digest {short_digest(state.digest)}"
    if state.saved_step is not None:
        words += f" · step {state.saved_step:,} saved"
    if state.peer_id:
        words += f" · peer {short_id(state.peer_id)}" + (" (client mode)" if state.client_mode else "")
    return words

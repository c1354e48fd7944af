"""The screen of one worker: `tt join`, and `tt aux-peer`, whose events carry snapshots of the swarm.

On a terminal a live view; elsewhere one plain line for each thing worth telling; with `json` the events
themselves. The state is a `PeerState`; here it is only drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from rich.text import Text

from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.terminal.format import (
    LEVEL_STYLES,
    NONE,
    byte_count,
    clean,
    fit,
    labelled,
    left_right,
    percent,
    plural,
    rate,
    short_digest,
    short_id,
)
from tt_cli.terminal.live_view import LiveScreen, clock
from tt_cli.terminal.log_lines import LogLine, LogLines, download_words, join_line
from tt_cli.terminal.status_lines import phase_words, trouble_counts
from tt_cli.terminal.swarm_lines import Curve, hourly, inner_steps, loss_line, next_step_bar, progress_bar, steps_bar

HINT = "Ctrl-C leaves cleanly; again at once"
LOG_LINES = 12
DrawSwarm = Callable[[Mapping[str, Any], Curve, int, int], list[Text]]
"""A snapshot's JSON, a loss curve, width and height → at most so many lines of at most so many cells."""
_DRAWN = ("phase", "step", "progress", "swarm", "listening", "download")
"""Lines whose content the live view draws anyway: they do not go into its log."""


class Screen(LiveScreen):
    """Shows the events of one worker. `show` may be called from any thread.

    title: the command and run, such as "tt join emoji". state: to begin with. join_run: the run as others name it;
    where it is given, the line with which others join through this peer is shown. draw_swarm: of a worker that tells of
    the whole swarm. A `Failure` is not printed as a line: the command line says it on stderr.
    """

    def __init__(
        self,
        title: str,
        state: PeerState,
        *,
        join_run: str | None = None,
        plain: bool = False,
        json: bool = False,
        stream: TextIO | None = None,
        draw_swarm: DrawSwarm | None = None,
    ) -> None:
        super().__init__(title, state.identity, plain=plain, json=json, stream=stream)
        self.state = state.model_copy(deep=True)
        self._join_run, self._draw_swarm = join_run, draw_swarm
        self._lines, self._log = LogLines(), deque[LogLine](maxlen=LOG_LINES)

    def tell(self, line: str, level: str) -> None:
        """Show a line of this process's own."""
        self.show(events.Log(line, level))

    def show(self, event: events.Event) -> None:
        """Take one event in and, where it is worth telling, tell it."""
        invitation = None
        if isinstance(event, events.Listening) and self._join_run is not None and not event.client_mode:
            invitation = join_line(self._join_run, [clean(address) for address in event.addresses])
        with self.lock:
            self.state.apply(event)
            line = self._lines.of(event, self.state)
            if line is not None and line.word not in _DRAWN:
                self._keep(line)
            if self.mode == "json":
                self.write(event.to_json())
            elif self.mode == "plain":
                if line is not None and line.word != "failure":
                    self.write(f"{clock(line.at)} {line}")
                if invitation is not None:
                    self.write(f"{clock(event.at)} {LogLine(event.at, 'join', invitation)}")
        if self.mode == "live" and invitation is not None:
            self.print_above(invitation)

    def _keep(self, line: LogLine) -> None:
        if line.word == "saved":  # only the newest checkpoint matters
            for old in [old for old in self._log if old.word == "saved"]:
                self._log.remove(old)
        self._log.append(line)

    def frame(self, width: int, height: int, now: float) -> list[Text]:
        """The live view."""
        state = self.state
        head = [left_right(*self.titles, width), fit(Text.assemble(*phase_words(state, now)), width)]
        if state.swarm is not None and self._draw_swarm is not None:
            room = max(3, height - len(head) - 3 - min(len(self._log), max(2, height // 6)))
            body = self._draw_swarm(state.swarm, state.losses(), width, room)
        else:
            body = _peer_lines(state, now, width)
        return page(head, body, list(self._log), width, height)


def page(head: list[Text], body: list[Text], log: list[LogLine], width: int, height: int) -> list[Text]:
    """Head, body, log and key hint, with empty lines between them as far as there is room."""
    foot = fit(Text(HINT, style="dim"), width)
    room = height - len(head) - len(body) - 1
    gaps = [[Text("")] * (room > number) for number in range(3)]
    newest = log[max(0, len(log) - max(0, room - 3)) :]
    styled = (((f"{clock(line.at)}  ", "dim"), (line.text, LEVEL_STYLES[line.level])) for line in newest)
    last = [fit(Text.assemble(*parts), width) for parts in styled]
    lines = [*head, *gaps[0], *body, *gaps[1], *last, *(gaps[2] if last else ())]
    return [*lines[: height - 1], foot]


def _peer_lines(state: PeerState, now: float, width: int) -> list[Text]:
    line = partial(labelled, width=width)
    lines = [loss_line(state.losses(), width)]
    if (download := state.download) is not None:
        words = f" {download_words(download)}"
        what = "weights" if state.state == "starting" else "state"
        lines.append(progress_bar(what, download.received / max(1, download.total), words, width, "blue"))
    elif state.samples is not None and state.target_samples is not None:
        lines.append(next_step_bar(state.samples, state.target_samples, state.seconds_to_step(now), width))
    else:
        lines.append(progress_bar("next step", 0, "", width))
    lines += [steps_bar(state.step or 0, state.total_steps, state.steps_seconds_left(), width), Text("")]
    if state.samples is not None:
        inner = "" if state.inner_steps is None else f" · {inner_steps(state.inner_steps, state.inner_steps_due)}"
        moved = f"sent {byte_count(state.bytes_sent)} · received {byte_count(state.bytes_received)}"
        of_swarm = f"{inner} · {percent(state.share or 0.0)} of the swarm · {plural(state.my_samples, 'sample')} so far"
        lines += [
            line("swarm", (plural(state.peers or 0, "peer"), "bold"), f" · {_rate(state.swarm_samples_per_second)}"),
            line("this peer", (_rate(state.samples_per_second), "bold"), of_swarm),
            line("traffic", moved + hourly(state.sent_per_hour, state.received_per_hour)),
        ]
        if state.rejected_micro_batches:
            words = f"{plural(state.rejected_micro_batches, 'micro-batch')} thrown away: not finite"
            lines.append(line("rejected", (words, "yellow")))
    if state.troubles:
        lines.append(line("troubles", (clean(trouble_counts(state)), "yellow")))
    lines.append(line("averaging", *_round_words(state.round, width - 10)))
    saved = f" · step {state.saved_step:,} saved" if state.saved_step is not None else ""
    peer = f" · peer {short_id(state.peer_id)}{' (client mode)' if state.client_mode else ''}" if state.peer_id else ""
    lines.append(line("weights", f"digest {short_digest(state.digest)}{saved}{peer}"))
    return lines


def _rate(samples: float | None) -> str:
    return f"{rate(samples or 0.0)} samples/s"


def _round_words(result: events.Round | None, room: int) -> list[tuple[str, str]]:
    if result is None:
        return [(NONE, "dim")]
    words = clean(result.words) or clean(result.outcome)
    style = "green" if result.outcome in events.STEPPED and not result.rejected else "yellow"
    parts = dict(result.seconds)
    whole = f" · {parts.pop('whole', math.fsum(parts.values())):.1f} s" if parts else ""
    each = ", ".join(f"{clean(part)} {value:.1f} s" for part, value in parts.items())
    fits = each and len(words) + len(f"{whole}: {each}") <= room
    return [(words, style), (f"{whole}: {each}" if fits else whole, "dim")]

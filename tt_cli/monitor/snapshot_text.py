"""A snapshot as text or JSON, once or at each change; and the sentence about the one truth, for every screen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.text import Text

from tt_cli.errors import TTError
from tt_cli.monitor.peer_tables import others, peer_rows
from tt_cli.monitor.scene import pause_words, peer_name, standing
from tt_cli.swarm.records.snapshot import SwarmNow, SwarmSnapshot
from tt_cli.terminal.format import clean, duration, loss_value, percent, plural, rate, short_digest
from tt_cli.terminal.live_view import Mode, clock, write_line
from tt_cli.terminal.swarm_lines import inner_steps

NAMED = 3  # of the peers that differ
AT_LEAST_EVERY = 30.0
"""Seconds after which plain text is printed again although nothing changed."""


def one_truth(snapshot: SwarmNow) -> Text:
    """The sentence about the state that peers at the newest step hold, and those that differ; "" for no peer."""
    holders = [peer for peer in snapshot.peers if peer.epoch == snapshot.epoch and peer.digest]
    if not holders:
        return Text()
    agree = snapshot.agreeing == snapshot.holders
    verb = "holds" if snapshot.agreeing == 1 else "hold"
    words = f"{snapshot.agreeing} of {plural(snapshot.holders, 'peer')} {verb} {short_digest(snapshot.digest)}"
    if not snapshot.digest:
        words = f"no state has a majority among {plural(snapshot.holders, 'peer')}"
    line = Text(f"one truth: {words}", style="green" if agree else "bold red")
    unlike = [
        f"{peer_name(peer, snapshot)} holds {short_digest(peer.digest)}" for peer in holders if not peer.in_agreement
    ]
    more = f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else ""
    line.append("".join(f"; {words}" for words in unlike[:NAMED]) + more)
    if snapshot.resynced_chunks:
        line.append(f"; {plural(snapshot.resynced_chunks, 'chunk')} resynced", style="yellow")
    for peer in snapshot.peers:
        for words in standing(peer, snapshot.trainers)[:1]:
            line.append(f"; {peer_name(peer, snapshot)} {words}", style="bold red" if peer.accused_by else "yellow")
    return line


def plain_text(snapshot: SwarmSnapshot) -> str:
    """The snapshot as lines for a log: one for the swarm, one for each peer."""
    parts = [
        *([pause_words(snapshot)] if snapshot.paused else []),
        f"step {snapshot.epoch:,} of {snapshot.total_steps:,}",
        f"{snapshot.samples:,} of {snapshot.target_batch_size:,} samples to the next",
        *([] if snapshot.inner_steps is None else [inner_steps(snapshot.inner_steps, snapshot.inner_steps_due)]),
        f"next step in {duration(snapshot.eta_s)}",
        f"end in {duration(snapshot.seconds_left)}",
        f"loss {loss_value(snapshot.loss)}",
        plural(snapshot.trainers, "trainer"),
        f"{rate(snapshot.samples_per_second)} samples/s",
        one_truth(snapshot).plain or "no state yet",
        *([] if snapshot.names_checked or not any(peer.user for peer in snapshot.peers) else ["names are self-given"]),
    ]
    lines = [f"{clock(snapshot.time)} {snapshot.identity}: " + ", ".join(parts)]
    for row in peer_rows(snapshot):
        peer = row.peer
        words = [peer.role, *([clean(peer.device)] if peer.device else [])]
        if peer.role == "trainer":
            words.append(f"{rate(peer.samples_per_second)} samples/s ({percent(peer.share)})")
        words += [*(row.remarks or ["in step"]), *others(peer)]
        words += [clean(peer.round)] if peer.round else []
        lines.append(f"  {row.name}: {', '.join(words)}, {duration(peer.age_s)} ago")
    return "\n".join(lines)


def follow(look: Callable[[], SwarmSnapshot], stream: TextIO, mode: Mode, *, interval: float, watch: bool) -> None:
    """Print what `look` returns as text or, in mode "json", as JSON: once, or with each change until interrupted.

    watch: go on after the first, also where a later look fails. A change is another step, peer or agreement,
    or a pause; text comes every 30 s without one. interval: seconds between two looks.
    """
    shown: tuple[object, ...] | None = None
    shown_at, told = 0.0, False
    while True:
        try:
            snapshot, told = look(), False
        except TTError as error:
            if shown is None:
                raise
            if not told:
                write_line(sys.stderr, f"tt: {error}; asking again")
            told = True
        else:
            agreement = sorted((peer.peer_id, peer.in_agreement) for peer in snapshot.peers)
            news = (snapshot.epoch, snapshot.paused, agreement)
            if news != shown or snapshot.time - shown_at >= AT_LEAST_EVERY:
                shown, shown_at = news, snapshot.time
                write_line(stream, json.dumps(snapshot.to_json()) if mode == "json" else plain_text(snapshot))
        if not watch:
            return
        time.sleep(interval)

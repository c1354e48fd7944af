"""A snapshot on a terminal: the live view of `tt monitor`, and the same as plain text."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.text import Text

from tt_cli.monitor.snapshot import Snapshot
from tt_cli.supervisor.drawing import (
    clean,
    duration,
    fit,
    left_right,
    loss_value,
    percent,
    plural,
    rate,
    short_digest,
)
from tt_cli.supervisor.screen import LiveView, Mode, clock, write_line
from tt_cli.supervisor.swarm_view import Curve, peer_name, run_seconds_left, swarm_lines

NAMED = 3  # of the peers that differ
AT_LEAST_EVERY = 30.0
"""Seconds after which plain text is printed again although nothing changed."""


class Curves:
    """The loss of the steps known: those an auxiliary peer remembers, and those that went by meanwhile."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}

    def add(self, snapshot: Snapshot) -> Curve:
        """Take a snapshot in; return (step, loss) of all steps so far, oldest first."""
        if snapshot.loss is not None and snapshot.epoch:
            self._losses[snapshot.epoch] = snapshot.loss
        self._losses.update((step, loss) for step, loss, _ in snapshot.history)
        return sorted(self._losses.items())


def one_truth(snapshot: Snapshot) -> Text:
    """Whether all peers at the newest step hold the same state, and who does not. Without peers: nothing."""
    peers = snapshot.to_json()["peers"]
    holders = [peer for peer in peers if peer["epoch"] == snapshot.epoch and peer["digest"]]
    if not holders:
        return Text()
    agree = snapshot.agreeing == snapshot.holders
    verb = "holds" if snapshot.agreeing == 1 else "hold"
    words = f"{snapshot.agreeing} of {plural(snapshot.holders, 'peer')} {verb} {short_digest(snapshot.digest)}"
    if not snapshot.digest:
        words = f"no state has a majority among {plural(snapshot.holders, 'peer')}"
    line = Text(f"one truth: {words}", style="green" if agree else "bold red")
    unlike = [f"{peer_name(peer)} holds {short_digest(peer['digest'])}" for peer in holders if not peer["in_agreement"]]
    more = f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else ""
    line.append("".join(f"; {words}" for words in unlike[:NAMED]) + more)
    if snapshot.resynced_chunks:
        line.append(f"; {plural(snapshot.resynced_chunks, 'chunk')} resynced", style="yellow")
    return line


def draw(snapshot: Snapshot, curve: Curve, width: int, height: int, *, now: float) -> list[Text]:
    """The live view as at most `height` lines of at most `width` cells. now: Unix seconds."""
    title = left_right(Text(f"tt monitor {snapshot.run}", style="bold"), Text(snapshot.identity, style="dim"), width)
    if not snapshot.peers:
        words = "no peer trains now: nobody has published anything for this run"
        body = [fit(Text(words, style="yellow"), width)]
    else:
        body = [fit(one_truth(snapshot), width), *swarm_lines(snapshot.to_json(), curve, width, height - 5)]
    foot = fit(Text(f"asked {duration(now - snapshot.time)} ago · Ctrl-C ends", style="dim"), width)
    return [title, Text(""), *body, Text(""), foot]


def plain_text(snapshot: Snapshot) -> str:
    """The snapshot as lines for a log: one for the swarm, one for each peer."""
    swarm = snapshot.to_json()
    parts = [
        f"step {snapshot.epoch:,} of {snapshot.total_steps:,}",
        f"{snapshot.samples:,} of {snapshot.target_batch_size:,} samples to the next",
        f"next step in {duration(snapshot.eta_s)}",
        f"end in {duration(run_seconds_left(swarm))}",
        f"loss {loss_value(snapshot.loss)}",
        plural(snapshot.trainers, "trainer"),
        f"{rate(snapshot.samples_per_second)} samples/s",
        one_truth(snapshot).plain or "no state yet",
    ]
    lines = [f"{clock(snapshot.time)} {snapshot.identity}: " + ", ".join(parts)]
    for peer, fields in zip(snapshot.peers, swarm["peers"], strict=True):
        words = [peer.role]
        if peer.device:
            words.append(clean(peer.device))
        if peer.role == "trainer":
            words.append(f"{rate(peer.samples_per_second)} samples/s ({percent(peer.share)})")
        words.append(f"{plural(peer.lag, 'step')} behind" if peer.lag else "in step")
        if peer.digest and not peer.in_agreement:
            words.append("state differs")
        if peer.resynced_chunks:
            words.append(f"{plural(peer.resynced_chunks, 'chunk')} resynced")
        words += [clean(peer.round)] if peer.round else []
        words.append(f"{duration(peer.age_s)} ago")
        lines.append(f"  {peer_name(fields)}: {', '.join(words)}")
    return "\n".join(lines)


def follow(look: Callable[[], Snapshot], stream: TextIO, mode: Mode, *, interval: float, watch: bool) -> None:
    """Show what `look` returns: live until interrupted, or once as text or JSON, or so with each change.

    watch: go on after the first. A change is another step, another peer or another agreement; text
    comes every 30 s without one. interval: seconds between two looks.
    """
    if mode == "live":
        _follow_live(look, stream, interval)
        return
    shown: tuple[object, ...] | None = None
    shown_at = 0.0
    while True:
        snapshot = look()
        news = (snapshot.epoch, sorted((peer.peer_id, peer.in_agreement) for peer in snapshot.peers))
        if news != shown or snapshot.time - shown_at >= AT_LEAST_EVERY:
            shown, shown_at = news, snapshot.time
            text = json.dumps(snapshot.to_json()) if mode == "json" else plain_text(snapshot)
            write_line(stream, text)
        if not watch:
            return
        time.sleep(interval)


def _follow_live(look: Callable[[], Snapshot], stream: TextIO, interval: float) -> None:
    curves, lock = Curves(), threading.Lock()
    snapshot = look()
    curve = curves.add(snapshot)

    def frame(width: int, height: int) -> list[Text]:
        with lock:
            return draw(snapshot, curve, width, height, now=time.time())

    with LiveView(stream, frame, whole=True):
        while True:
            time.sleep(interval)
            seen = look()
            with lock:
                snapshot, curve = seen, curves.add(seen)

"""A worker's events in lines for a person: those worth telling, on every screen and in plain output.

Pure: no terminal and no clock in here, so the same events give the same lines.
"""

from __future__ import annotations

import ipaddress
import math
import shlex
from dataclasses import dataclass
from typing import Any

from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.terminal.format import (
    byte_count,
    clean,
    duration,
    loss_value,
    percent,
    plural,
    rate,
    short_digest,
    short_id,
)

PROGRESS_EVERY = 30.0
"""Seconds between two lines of progress where nothing is drawn live."""


@dataclass(frozen=True)
class LogLine:
    """Something worth a line. word: what kind of thing, one word. level: "info", "warning" or "error"."""

    at: float
    word: str
    text: str
    level: str = "info"

    def __str__(self) -> str:
        return f"{self.word:<12} {self.text}"


class LogLines:
    """The lines that a worker's events are worth, most often none or one for an event."""

    def __init__(self) -> None:
        self._phase = ("", "")
        self._progress_at: float | None = None
        self._swarm: tuple[Any, ...] | None = None

    def of(self, event: events.Event, state: PeerState) -> list[LogLine]:
        """Lines about `event`, which has just been applied to `state`."""
        match event:
            case events.Log():
                level = event.level if event.level in ("warning", "error") else "info"
                return [LogLine(event.at, "log" if level == "info" else level, clean(event.message), level)]
            case events.Choice():
                return [LogLine(event.at, "choice", clean(f"{event.what} {event.value}: {event.reason}"))]
            case events.Phase():
                return self._phase_lines(event)
            case events.Listening():
                where = "client mode, others cannot dial this peer"
                if not event.client_mode:
                    where = clean(best_address(event.addresses) or "no address")
                return [LogLine(event.at, "listening", f"peer {clean(event.peer_id)}, {where}")]
            case events.Progress() if self._due(event.at, first=False):
                return [LogLine(event.at, "progress", _progress_words(event))]
            case events.Contribution():
                text = f"{plural(event.samples, 'sample')} of this peer went into step {event.epoch:,}"
                return [LogLine(event.at, "contributed", text)]
            case events.Round():
                return _round_lines(event)
            case events.Step():
                return [LogLine(event.at, "step", _step_words(event, state))]
            case events.Download() if self._due(event.at, first=True):
                return [LogLine(event.at, "download", download_words(event))]
            case events.Synchronised():
                return [LogLine(event.at, "synchronised", _synchronised_words(event))]
            case events.Saved():
                return [LogLine(event.at, "saved", f"checkpoint of step {event.epoch:,}: {clean(event.path)}")]
            case events.Snapshot():
                return self._swarm_lines(event)
            case events.Trouble():
                remedy = f": {clean(event.remedy)}" if event.remedy else ""
                return [LogLine(event.at, "trouble", f"{clean(event.words)}{remedy}", "warning")]
            case events.Failure():
                return [LogLine(event.at, "failure", clean(event.message), "error")]
            case events.Finished():
                return [LogLine(event.at, "finished", clean(event.reason))]
        return []

    def _due(self, at: float, *, first: bool) -> bool:
        """True when there has been no line of progress for so long; of the first one where it is due at once."""
        if self._progress_at is None:
            self._progress_at = at
            return first
        due = at - self._progress_at >= PROGRESS_EVERY
        self._progress_at = at if due else self._progress_at
        return due

    def _phase_lines(self, event: events.Phase) -> list[LogLine]:
        phase, reason = clean(event.phase), clean(event.reason)
        # A peer that trains averages at every step, and the step has a line of its own.
        if phase == "averaging" or phase == self._phase[0] == "training" or (phase, reason) == self._phase:
            return []
        self._phase = (phase, reason)
        return [LogLine(event.at, "phase", f"{phase}: {reason}" if reason else phase)]

    def _swarm_lines(self, event: events.Snapshot) -> list[LogLine]:
        swarm, before = event.swarm, self._swarm
        self._swarm = swarm["epoch"], sorted((peer["peer_id"], peer["in_agreement"]) for peer in swarm["peers"])
        if before == self._swarm:
            return []
        text = (
            f"step {swarm['epoch']:,} of {swarm['total_steps']:,}, loss {loss_value(swarm['loss'])}, "
            f"{plural(swarm['trainers'], 'trainer')}, {rate(swarm['samples_per_second'])} samples/s, "
            f"digest {short_digest(swarm['digest'])}"
        )
        return [LogLine(event.at, "swarm", text)]


def _progress_words(event: events.Progress) -> str:
    soon = f", in {duration(event.eta)}" if math.isfinite(event.eta) else ""
    parts = [
        f"{event.samples:,} of {event.target_samples:,} samples to step {event.epoch + 1:,}{soon}",
        plural(event.peers, "peer"),
        f"{rate(event.my_samples_per_second)} samples/s here ({percent(event.my_share)})",
        f"loss {loss_value(event.loss)}",
        f"sent {byte_count(event.bytes_sent)}, received {byte_count(event.bytes_received)}",
    ]
    return "; ".join(parts)


def _round_lines(event: events.Round) -> list[LogLine]:
    words = clean(event.words) or clean(event.outcome)
    if event.rejected and event.outcome in events.STEPPED:
        words += "; refused " + ", ".join(f"{short_id(peer)} ({clean(why)})" for peer, why in event.rejected.items())
    elif event.outcome in (*events.STEPPED, "failed"):  # one that failed is told as trouble
        return []
    return [LogLine(event.at, "round", words, "warning")]


def _step_words(event: events.Step, state: PeerState) -> str:
    parts = [f"{event.epoch:,} of {state.total_steps:,}", f"loss {loss_value(event.loss)}"]
    made = state.round
    if made is not None and made.epoch == event.epoch and made.outcome in events.STEPPED:
        alone = made.outcome == "alone"
        parts.append("alone" if alone else plural(len(made.members), "peer"))
        parts.append(plural(made.samples, "sample"))
        if made.received < 1.0 and not alone:
            parts.append(f"{percent(made.received)} received")
        if made.mended:
            parts.append(f"{plural(made.mended, 'part')} from other members")
    elif state.peers is not None:
        parts.append(plural(state.peers, "peer"))
    if state.step_took is not None:
        parts.append(f"{state.step_took:.1f} s")
    return ", ".join([*parts, f"digest {short_digest(event.digest)}"])


def _synchronised_words(event: events.Synchronised) -> str:
    digest = short_digest(event.digest)
    if event.source == "seed":
        return f"fresh weights from the run's seed, digest {digest}"
    if event.source == "backup":
        return f"state of step {event.epoch:,} from this machine's backup, digest {digest}"
    what = f"state of step {event.epoch:,}" if event.chunks else f"the average of step {event.epoch:,}"
    names = f" ({clean(', '.join(event.names))})" if event.names else ""
    amount = f"{byte_count(event.bytes)} in {event.seconds:.1f} s"
    return f"{what}{names} from peer {short_id(event.source)}, {amount}, digest {digest}"


def download_words(event: events.Download) -> str:
    """Progress of a state's download: how far, from whom, how fast."""
    words = f"{byte_count(event.received)} of {byte_count(event.total)}"
    if event.donors:
        words += f" from {plural(event.donors, 'donor')} at {byte_count(event.bytes_per_second)}/s"
    return words if event.eta is None else f"{words}, {duration(event.eta)} left"


def best_address(addresses: list[str]) -> str | None:
    """The address that most others can reach: a name or public, else of a local network, else loopback."""
    return min(addresses, key=_reach, default=None)


def _reach(address: str) -> int:
    parts = address.split("/")
    tcp = 0 if "tcp" in parts else 1
    try:
        host = ipaddress.ip_address(parts[2])
    except (IndexError, ValueError):
        return tcp if len(parts) > 2 and parts[1].startswith("dns") else 8
    return tcp + (6 if host.is_loopback else 4 if host.is_private or host.is_unspecified else 2)


def join_line(run: str, addresses: list[str]) -> str | None:
    """The line that another person types to join through this peer, None where nobody can dial it.

    run: the run as that person would name it (built-in name, file or Hub repository).
    """
    address = best_address(addresses)
    return f"tt join {shlex.quote(run)} --peer {shlex.quote(address)}" if address else None

"""A worker's events in lines for a person: those worth telling, on every screen and in plain output.

Pure: no terminal and no clock in here, so the same events give the same lines.
"""

from __future__ import annotations

import ipaddress
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
from tt_cli.terminal.swarm_lines import hourly, inner_steps

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
    """The lines that a worker's events are worth."""

    def __init__(self) -> None:
        self._phase = ("", "")
        self._progress_at: float | None = None
        self._swarm: tuple[Any, ...] | None = None

    def of(self, event: events.Event, state: PeerState) -> LogLine | None:
        """The line about `event`, which has just been applied to `state`; None for one that is worth none."""
        word, level = event.kind, "info"
        text: str | None = None
        match event:
            case events.Log(message=text, level="warning" | "error"):
                word = level = event.level
            case events.Log(message=text) | events.Finished(reason=text):
                pass
            case events.Failure(message=text):
                level = "error"
            case events.Choice():
                text = f"{event.what} {event.value}: {event.reason}"
            case events.Phase():
                text = self._phase_words(event)
            case events.Listening():
                address = best_address(event.addresses) or "no address"
                where = "client mode, others cannot dial this peer" if event.client_mode else address
                text = f"peer {event.peer_id}, {where}"
            case events.Progress() if self._due(event.at, first=False):
                text = _progress_words(event)
            case events.Contribution():
                word = "contributed"
                text = f"{plural(event.samples, 'sample')} of this peer went into step {event.epoch:,}"
            case events.Round():
                text, level = _round_words(event), "warning"
            case events.Step():
                text = _step_words(event, state)
            case events.Download() if self._due(event.at, first=True):
                text = download_words(event)
            case events.Synchronised():
                text = _synchronised_words(event)
            case events.Saved():
                text = f"checkpoint of step {event.epoch:,}: {event.path}"
            case events.Snapshot():
                word, text = "swarm", self._swarm_words(event.swarm)
            case events.Trouble():
                text, level = event.words + (f": {event.remedy}" if event.remedy else ""), "warning"
        return None if text is None else LogLine(event.at, word, clean(text), level)

    def _due(self, at: float, *, first: bool) -> bool:
        """True when there has been no line of progress for so long; of the first one where it is due at once."""
        due = first if self._progress_at is None else at - self._progress_at >= PROGRESS_EVERY
        if due or self._progress_at is None:
            self._progress_at = at
        return due

    def _phase_words(self, event: events.Phase) -> str | None:
        # A peer that trains averages at every step, and the step has a line of its own.
        if event.phase == "averaging" or event.phase == self._phase[0] == "training":
            return None
        before, self._phase = self._phase, (event.phase, event.reason)
        if self._phase == before:
            return None
        return f"{event.phase}: {event.reason}" if event.reason else event.phase

    def _swarm_words(self, swarm: dict[str, Any]) -> str | None:
        before = self._swarm
        self._swarm = swarm["epoch"], sorted((peer["peer_id"], peer["in_agreement"]) for peer in swarm["peers"])
        if before == self._swarm:
            return None
        return (
            f"step {swarm['epoch']:,} of {swarm['total_steps']:,}, loss {loss_value(swarm['loss'])}, "
            f"{plural(swarm['trainers'], 'trainer')}, {rate(swarm['samples_per_second'])} samples/s, "
            f"digest {short_digest(swarm['digest'])}"
        )


def _progress_words(event: events.Progress) -> str:
    soon = "" if event.eta is None else f", in {duration(event.eta)}"
    inner = "" if event.inner_steps is None else f"; {inner_steps(event.inner_steps, event.inner_steps_due)} here"
    return (
        f"{event.samples:,} of {event.target_samples:,} samples to step {event.epoch + 1:,}{soon}{inner}; "
        f"{plural(event.peers, 'peer')}; {rate(event.my_samples_per_second)} samples/s here "
        f"({percent(event.my_share)}); loss {loss_value(event.loss)}; "
        f"sent {byte_count(event.bytes_sent)}, received {byte_count(event.bytes_received)}"
        f"{hourly(event.sent_per_hour, event.received_per_hour, ', ')}"
    )


def _round_words(event: events.Round) -> str | None:
    words = event.words or event.outcome
    if event.rejected and event.outcome in events.STEPPED:
        return f"{words}; refused {', '.join(f'{short_id(peer)} ({why})' for peer, why in event.rejected.items())}"
    return None if event.outcome in (*events.STEPPED, "failed") else words  # one that failed is told as trouble


def _step_words(event: events.Step, state: PeerState) -> str:
    how = [] if state.peers is None else [plural(state.peers, "peer")]
    result = state.round
    if result is not None and result.epoch == event.epoch and result.outcome in events.STEPPED:
        alone = result.outcome == "alone"
        how = ["alone" if alone else plural(len(result.members), "peer"), plural(result.samples, "sample")]
        if result.received < 1.0 and not alone:
            how.append(f"{percent(result.received)} received")
        if result.mended:
            how.append(f"{plural(result.mended, 'part')} from other members")
    if state.step_took is not None:
        how.append(f"{state.step_took:.1f} s")
    progress = f"{event.epoch:,} of {state.total_steps:,}, loss {loss_value(event.loss)}"
    return ", ".join([progress, *how, f"digest {short_digest(event.digest)}"])


def _synchronised_words(event: events.Synchronised) -> str:
    if event.source == "seed":
        what = "fresh weights from the run's seed"
    elif event.source == "backup":
        what = f"state of step {event.epoch:,} from this machine's backup"
    else:
        names = f" ({', '.join(event.names)})" if event.names else ""
        taken = f"{'state' if event.chunks else 'the average'} of step {event.epoch:,}{names}"
        what = f"{taken} from peer {short_id(event.source)}, {byte_count(event.bytes)} in {event.seconds:.1f} s"
    return f"{what}, digest {short_digest(event.digest)}"


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
    """The line that another person, who calls it `run`, types to join through this peer; None: nobody can dial it."""
    address = best_address(addresses)
    return f"tt join {shlex.quote(run)} --peer {shlex.quote(address)}" if address else None

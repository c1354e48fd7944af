"""What a worker's events add up to: the state that its screen draws, and the lines worth telling.

Pure: no terminal and no clock in here, so the same events give the same view and the same lines.
"""

from __future__ import annotations

import ipaddress
import math
import shlex
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tt_cli.supervisor import events
from tt_cli.terminal.format import (
    DRAWABLE,
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

CURVE = 4096
"""Steps of the loss curve that are kept; every second one of the older half goes when there are more."""

NOT_STEPPED = ("failed", "dropped")


@dataclass(frozen=True)
class LogLine:
    """Something worth a line. word: what kind of thing, one word. level: "info", "warning" or "error"."""

    at: float
    word: str
    text: str
    level: str = "info"

    def __str__(self) -> str:
        return f"{self.word:<12} {self.text}"


@dataclass
class WorkerView:
    """The state of one worker; `fold` takes the events in order."""

    total_steps: int
    phase: str = "starting"
    reason: str = ""
    phase_since: float | None = None
    peer_id: str = ""
    addresses: list[str] = field(default_factory=list)
    client_mode: bool = False
    epoch: int | None = None
    digest: str = ""
    saved: int | None = None
    progress: events.Progress | None = None
    round: events.Round | None = None
    swarm: dict[str, Any] | None = None
    download: events.Download | None = None
    troubles: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    ended: bool = False
    _stepped_at: float | None = None
    _line_phase: tuple[str, str] = ("", "")
    _progress_line_at: float | None = None
    _step_round: events.Round | None = None

    def fold(self, event: events.Event) -> list[LogLine]:
        """Take `event` into the view; return what it is worth telling, most often nothing or one line."""
        match event:
            case events.Log():
                level = event.level if event.level in ("warning", "error") else "info"
                word = "log" if level == "info" else level
                return [LogLine(event.at, word, clean(event.message), level)]
            case events.Choice():
                text = clean(f"{event.what} {event.value}: {event.reason}")
                return [LogLine(event.at, "choice", text)]
            case events.Phase():
                return self._phase(event)
            case events.Listening():
                return self._listening(event)
            case events.Progress():
                return self._progress(event)
            case events.Contribution():
                text = f"{plural(event.samples, 'sample')} of this peer went into step {event.epoch:,}"
                return [LogLine(event.at, "contributed", text)]
            case events.Round():
                return self._round(event)
            case events.Step():
                return self._step(event)
            case events.Download():
                return self._downloading(event)
            case events.Synchronised():
                return self._synchronised(event)
            case events.Saved():
                self.saved = event.epoch
                return [LogLine(event.at, "saved", f"checkpoint of step {event.epoch:,}: {clean(event.path)}")]
            case events.Snapshot():
                return self._snapshot(event)
            case events.Trouble():
                self.troubles[event.what] = self.troubles.get(event.what, 0) + 1
                remedy = f": {clean(event.remedy)}" if event.remedy else ""
                return [LogLine(event.at, "trouble", f"{clean(event.words)}{remedy}", "warning")]
            case events.Failure():
                self._enter("failed", clean(event.message), event.at)
                self.ended = True
                return [LogLine(event.at, "failure", clean(event.message), "error")]
            case events.Finished():
                self._enter("finished", clean(event.reason), event.at)
                self.ended = True
                return [LogLine(event.at, "finished", clean(event.reason))]
        return []

    def steps_seconds_left(self) -> float | None:
        """Seconds to the run's last step, by the mean of the last steps; None before the second step."""
        if self.epoch is None or not self.step_seconds or self.epoch >= self.total_steps:
            return None
        return (self.total_steps - self.epoch) * math.fsum(self.step_seconds) / len(self.step_seconds)

    def eta(self, now: float) -> float | None:
        """Seconds from `now` to the next global step; None for unknown."""
        if self.progress is None or not math.isfinite(self.progress.eta):
            return None
        return max(0.0, self.progress.eta - max(0.0, now - self.progress.at))

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of the steps seen, and of the step now being made as far as it has come."""
        curve = list(self.curve)
        if self.progress is not None and self.progress.loss is not None:
            step = self.progress.epoch + 1
            if not curve or step > curve[-1][0]:
                curve.append((step, self.progress.loss))
        return curve

    def _enter(self, phase: str, reason: str, at: float) -> None:
        if (phase, reason) != (self.phase, self.reason) or self.phase_since is None:
            self.phase, self.reason, self.phase_since = phase, reason, at

    def _phase(self, event: events.Phase) -> list[LogLine]:
        phase, reason = clean(event.phase), clean(event.reason)
        self._enter(phase, reason, event.at)
        self.ended = False
        if phase != "syncing":
            self.download = None
        if phase == "paused":
            self.progress = self.round = None
        if phase in ("starting", "syncing", "paused"):
            self._stepped_at = None
        elif phase == "training" and self._stepped_at is None:
            self._stepped_at = event.at
        # A peer that trains averages at every step, and the step has a line of its own.
        if phase == "averaging" or phase == self._line_phase[0] == "training":
            return []
        if (phase, reason) == self._line_phase:
            return []
        self._line_phase = (phase, reason)
        return [LogLine(event.at, "phase", f"{phase}: {reason}" if reason else phase)]

    def _listening(self, event: events.Listening) -> list[LogLine]:
        self.peer_id, self.client_mode = event.peer_id, event.client_mode
        self.addresses = [clean(address) for address in event.addresses]
        where = "client mode, others cannot dial this peer"
        if not event.client_mode:
            where = best_address(self.addresses) or "no address"
        return [LogLine(event.at, "listening", f"peer {clean(event.peer_id)}, {where}")]

    def _progress(self, event: events.Progress) -> list[LogLine]:
        self.progress, self.epoch = event, event.epoch
        if self._progress_line_at is None:
            self._progress_line_at = event.at
        if event.at - self._progress_line_at < PROGRESS_EVERY:
            return []
        self._progress_line_at = event.at
        parts = [
            f"{event.samples:,} of {event.target_samples:,} samples to step {event.epoch + 1:,}"
            + (f", in {duration(event.eta)}" if math.isfinite(event.eta) else ""),
            plural(event.peers, "peer"),
            f"{rate(event.my_samples_per_second)} samples/s here ({percent(event.my_share)})",
            f"loss {loss_value(event.loss)}",
            f"sent {byte_count(event.bytes_sent)}, received {byte_count(event.bytes_received)}",
        ]
        return [LogLine(event.at, "progress", "; ".join(parts))]

    def _round(self, event: events.Round) -> list[LogLine]:
        self.round = event
        words = clean(event.words) or clean(event.outcome)
        if event.outcome in NOT_STEPPED:
            self._step_round = None
            told = event.outcome == "failed"  # as trouble, with what is done about it
            return [] if told else [LogLine(event.at, "round", words, "warning")]
        self._step_round = event
        if event.rejected:
            refused = ", ".join(f"{short_id(peer)} ({clean(why)})" for peer, why in event.rejected.items())
            return [LogLine(event.at, "round", f"{words}; refused {refused}", "warning")]
        return []

    def _step(self, event: events.Step) -> list[LogLine]:
        made = self._step_round
        seconds = event.at - self._stepped_at if self._stepped_at is not None else None
        if seconds is not None:
            self.step_seconds.append(seconds)
        self._stepped_at, self._step_round = event.at, None
        self.epoch, self.digest = event.epoch, event.digest
        self._add_loss(event.epoch, event.loss)
        parts = [f"{event.epoch:,} of {self.total_steps:,}", f"loss {loss_value(event.loss)}"]
        if made is not None:
            alone = made.outcome == "alone"
            parts.append("alone" if alone else plural(len(made.members), "peer"))
            parts.append(plural(made.samples, "sample"))
            if made.received < 1.0 and not alone:
                parts.append(f"{percent(made.received)} received")
            if made.mended:
                parts.append(f"{plural(made.mended, 'part')} from other members")
        elif self.progress is not None:
            parts.append(plural(self.progress.peers, "peer"))
        if seconds is not None:
            parts.append(f"{seconds:.1f} s")
        parts.append(f"digest {short_digest(event.digest)}")
        return [LogLine(event.at, "step", ", ".join(parts))]

    def _downloading(self, event: events.Download) -> list[LogLine]:
        self.download = event
        if self._progress_line_at is not None and event.at - self._progress_line_at < PROGRESS_EVERY:
            return []
        self._progress_line_at = event.at
        return [LogLine(event.at, "download", download_words(event))]

    def _synchronised(self, event: events.Synchronised) -> list[LogLine]:
        self.download = None
        self.epoch, self.digest, self._stepped_at = event.epoch, event.digest, None
        digest = short_digest(event.digest)
        if event.source == "seed":
            text = f"fresh weights from the run's seed, digest {digest}"
        elif event.source == "backup":
            text = f"state of step {event.epoch:,} from this machine's backup, digest {digest}"
        else:
            amount = f"{byte_count(event.bytes)} in {event.seconds:.1f} s"
            what = f"state of step {event.epoch:,}" if event.chunks else f"the average of step {event.epoch:,}"
            if event.names:
                what += f" ({clean(', '.join(event.names))})"
            text = f"{what} from peer {short_id(event.source)}, {amount}, digest {digest}"
        return [LogLine(event.at, "synchronised", text)]

    def _snapshot(self, event: events.Snapshot) -> list[LogLine]:
        before, self.swarm = self.swarm, event.swarm
        swarm = event.swarm
        mine = next((peer for peer in swarm["peers"] if peer["peer_id"] == self.peer_id), swarm)
        self.epoch, self.digest = mine["epoch"], mine["digest"]
        for step, loss, _ in swarm["history"]:
            self._add_loss(step, loss)
        self._add_loss(swarm["epoch"], swarm["loss"])
        if before is not None and _news(before) == _news(swarm):
            return []
        text = (
            f"step {swarm['epoch']:,} of {swarm['total_steps']:,}, loss {loss_value(swarm['loss'])}, "
            f"{plural(swarm['trainers'], 'trainer')}, {rate(swarm['samples_per_second'])} samples/s, "
            f"digest {short_digest(swarm['digest'])}"
        )
        return [LogLine(event.at, "swarm", text)]

    def _add_loss(self, step: int, loss: float | None) -> None:
        if loss is None or not abs(loss) < DRAWABLE or (self.curve and step <= self.curve[-1][0]):
            return
        self.curve.append((step, loss))
        if len(self.curve) > CURVE:
            half = CURVE // 2
            self.curve = self.curve[:half:2] + self.curve[half:]


def _news(swarm: dict[str, Any]) -> tuple[Any, ...]:
    return swarm["epoch"], sorted((peer["peer_id"], peer["in_agreement"]) for peer in swarm["peers"])


def download_words(event: events.Download) -> str:
    """How far a state has come, from whom, how fast."""
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
    """What another person types to join through this peer, None where nobody can dial it.

    run: the run as that person would name it (built-in name, file or Hub repository).
    """
    address = best_address(addresses)
    return f"tt join {shlex.quote(run)} --peer {shlex.quote(address)}" if address else None

"""The state of one peer: the one fold of its worker's events, and the file that keeps it.

Every screen, the watchdog and the sinks read it. The supervisor answers `tt status` with it, and writes it beside the
run's other files: what was last known of a peer outlives a crash, and a machine that has lost its power.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.supervisor import events
from tt_cli.supervisor.household.limits import Origin

KEPT_WORDS = 5
KEPT_STEPS = 16
CURVE = 4096
"""Steps of the loss curve that are kept; every second one of the older half goes when there are more."""
LARGEST_LOSS = 1e9
"""Larger values are no losses; they would flatten every curve, and their sums may overflow."""


class Chosen(BaseModel):
    """An automatic choice and its reason."""

    value: str
    reason: str


class Counted(BaseModel):
    """Troubles of one kind: how many since the supervisor started, and the newest."""

    count: int
    words: str
    remedy: str
    at: float


class Said(BaseModel):
    """A line that a person should be able to read afterwards."""

    at: float
    text: str


class PeerState(BaseModel):
    """One peer of this machine. Times are Unix time in seconds; bytes and restarts count from the supervisor's start.

    In a file, fields of a later version are ignored, and missing ones have their defaults.

    state: starting, syncing, training, averaging, waiting, paused, leaving or ended; failed until the supervisor has
    decided what follows. until: when it will change, where that is known. paused, paused_until, finish: what a person
    has asked for. share: of the swarm's samples per second.

    my_samples, figures: of this worker. round, download, swarm: the newest event of the kind. failed_rounds: in a row.
    samples_seen: towards the next step, 0 when it begins. step_seconds: of the last steps; step_took: of the last one,
    where it was seen whole. began_step_at: None while there is none to be made.
    """

    run: str
    identity: str
    role: Literal["trainer", "aux"] = "trainer"
    total_steps: int = 0
    pid: int = Field(default_factory=os.getpid)
    log: str = ""
    version: str = ""
    started: float = Field(default_factory=time.time)
    updated: float = Field(default_factory=time.time)

    state: str = "starting"
    reason: str = ""
    since: float = Field(default_factory=time.time)
    until: float | None = None
    paused: bool = False
    paused_until: float | None = None
    finish: bool = False

    step: int | None = None
    loss: float | None = None
    samples: int | None = None
    target_samples: int | None = None
    eta: float | None = None
    peers: int | None = None
    samples_per_second: float | None = None
    swarm_samples_per_second: float | None = None
    share: float | None = None
    last_round: str = ""
    saved_step: int | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    rejected_micro_batches: int = 0
    inner_steps: int | None = None
    inner_steps_due: int | None = None
    sent_per_hour: int = 0
    received_per_hour: int = 0
    download_received: int | None = None
    download_total: int | None = None
    restarts: int = 0

    peer_id: str = ""
    addresses: list[str] = Field(default_factory=list)
    client_mode: bool = False
    choices: dict[str, Chosen] = Field(default_factory=dict)
    limits: list[Origin] = Field(default_factory=list)
    troubles: dict[str, Counted] = Field(default_factory=dict)
    words: list[Said] = Field(default_factory=list)

    # For the screens and the watchdog of the process that applies the events; not kept.
    digest: str = Field("", exclude=True)
    my_samples: int = Field(0, exclude=True)
    figures: dict[str, float] = Field(default_factory=dict, exclude=True)
    round: events.Round | None = Field(None, exclude=True)
    download: events.Download | None = Field(None, exclude=True)
    swarm: dict[str, Any] | None = Field(None, exclude=True)
    curve: list[tuple[int, float]] = Field(default_factory=list, exclude=True)
    failed_rounds: int = Field(0, exclude=True)
    samples_seen: int = Field(0, exclude=True)
    step_seconds: deque[float] = Field(default_factory=lambda: deque(maxlen=KEPT_STEPS), exclude=True)
    step_took: float | None = Field(None, exclude=True)
    began_step_at: float | None = Field(None, exclude=True)
    samples_grew_at: float = Field(default_factory=time.time, exclude=True)
    download_grew_at: float = Field(default_factory=time.time, exclude=True)
    eta_at: float = Field(0.0, exclude=True)
    _running_loss: tuple[int, float] | None = None
    # What workers before the present one have moved; each counts from its own start.
    _sent: int = 0
    _received: int = 0

    def apply(self, event: events.Event, now: float | None = None) -> None:
        """Take one event in. now: when it came, by the clock that all times here are of; else `event.at`."""
        self.updated = now = event.at if now is None else now
        match event:
            case events.Phase():
                self.enter(event.phase, event.reason, now, event.until)
            case events.Listening():
                self.peer_id, self.addresses, self.client_mode = event.peer_id, event.addresses, event.client_mode
            case events.Choice():
                self.choices[event.what] = Chosen(value=event.value, reason=event.reason)
            case events.Progress():
                self._progress(event, now)
            case events.Round():
                self._round(event, now)
            case events.Step():
                self._step(event, now)
            case events.Download():
                if self.download is None or event.received != self.download.received:
                    self.download_grew_at = now
                self.download = event
                self.download_received, self.download_total = event.received, event.total
            case events.Synchronised():
                self._begin_step(event.epoch, event.digest, None)
                self.samples_grew_at = now
                self._end_download()
            case events.Saved():
                self.saved_step = event.epoch
            case events.Snapshot():
                self._snapshot(event.swarm)
            case events.Trouble():
                count = 1 + (self.troubles[event.what].count if event.what in self.troubles else 0)
                self.troubles[event.what] = Counted(count=count, words=event.words, remedy=event.remedy, at=now)
                self._say(now, event.words)
            case events.Log():
                self._say(now, event.message)
            case events.Failure():
                self._say(now, event.message)
                self.enter("failed", event.message, now)
            case events.Finished():
                self.enter("ended", event.reason, now)

    def enter(self, state: str, reason: str, at: float, until: float | None = None) -> None:
        """Be in `state`; a new reason alone does not make it begin anew."""
        if state != self.state:
            self.since = self.download_grew_at = at
            self._end_download()
        self.state, self.reason, self.until = state, reason, until
        if state in ("starting", "syncing", "paused"):
            self.began_step_at = None
        elif state == "training" and self.began_step_at is None:
            self.began_step_at = self.samples_grew_at = at
        if state in ("paused", "ended", "failed", "starting"):
            self._end_download()
            self.samples = self.target_samples = self.eta = self.peers = None
            self.samples_per_second = self.swarm_samples_per_second = self.share = None
            self.round = None
            self._sent, self._received = self.bytes_sent, self.bytes_received

    @property
    def ended(self) -> bool:
        """True when its worker has said its last word."""
        return self.state in ("ended", "failed")

    def steps_seconds_left(self) -> float | None:
        """Seconds to the run's last step, by the mean of the last steps; None before the second step."""
        if self.step is None or not self.step_seconds or self.step >= self.total_steps:
            return None
        return (self.total_steps - self.step) * math.fsum(self.step_seconds) / len(self.step_seconds)

    def seconds_to_step(self, now: float) -> float | None:
        """Seconds from `now` to the next global step; None for unknown."""
        if self.eta is None or not math.isfinite(self.eta):
            return None
        return max(0.0, self.eta - max(0.0, now - self.eta_at))

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of the steps seen, and of the step now being made as far as it has come."""
        running = self._running_loss
        if running is None or (self.curve and running[0] <= self.curve[-1][0]):
            return self.curve
        return [*self.curve, running]

    def _progress(self, event: events.Progress, now: float) -> None:
        if event.samples > self.samples_seen:
            self.samples_grew_at = now
        self.samples_seen = event.samples
        self.step, self.samples, self.target_samples = event.epoch, event.samples, event.target_samples
        if event.loss is not None:
            self.loss, self._running_loss = event.loss, (event.epoch + 1, event.loss)
        self.eta, self.eta_at, self.peers = event.eta, now, event.peers
        self.samples_per_second, self.share = event.my_samples_per_second, event.my_share
        self.swarm_samples_per_second, self.my_samples = event.swarm_samples_per_second, event.my_samples
        self.figures = event.figures
        self.bytes_sent = self._sent + event.bytes_sent
        self.bytes_received = self._received + event.bytes_received
        self.sent_per_hour, self.received_per_hour = event.sent_per_hour, event.received_per_hour
        self.inner_steps, self.inner_steps_due = event.inner_steps, event.inner_steps_due
        self.rejected_micro_batches = event.rejected_micro_batches

    def _round(self, event: events.Round, now: float) -> None:
        self.round, self.last_round = event, event.words or event.outcome
        self.failed_rounds = self.failed_rounds + 1 if event.outcome == "failed" else 0
        if event.outcome not in events.STEPPED:
            self._say(now, event.words)

    def _step(self, event: events.Step, now: float) -> None:
        self.step_took = None if self.began_step_at is None or now < self.began_step_at else now - self.began_step_at
        if self.step_took is not None:
            self.step_seconds.append(self.step_took)
        self._begin_step(event.epoch, event.digest, now)
        self.samples_grew_at, self.loss = now, event.loss
        self.curve = [point for point in self.curve if point[0] < event.epoch]  # others: before it was taken back
        self._add_loss(event.epoch, event.loss)

    def _begin_step(self, done: int, digest: str, at: float | None) -> None:
        self.step, self.digest, self.began_step_at = done, digest, at
        self.samples_seen = self.failed_rounds = 0

    def _snapshot(self, swarm: dict[str, Any]) -> None:
        self.swarm, self.step, self.loss = swarm, swarm.get("epoch"), swarm.get("loss")
        self.peers, self.swarm_samples_per_second = swarm.get("trainers"), swarm.get("samples_per_second")
        own = next((peer for peer in swarm.get("peers", ()) if peer["peer_id"] == self.peer_id), swarm)
        self.digest = own.get("digest", "")
        for step, loss, _ in swarm.get("history", ()):
            self._add_loss(step, loss)
        if self.step is not None:
            self.curve = [point for point in self.curve if point[0] <= self.step]
            self._add_loss(self.step, self.loss)

    def _add_loss(self, step: int, loss: float | None) -> None:
        if loss is None or not abs(loss) < LARGEST_LOSS or (self.curve and step <= self.curve[-1][0]):
            return
        self.curve.append((step, loss))
        if len(self.curve) > CURVE:
            half = CURVE // 2
            self.curve = self.curve[:half:2] + self.curve[half:]

    def _end_download(self) -> None:
        self.download = self.download_received = self.download_total = None

    def _say(self, at: float, text: str) -> None:
        self.words = [*self.words, Said(at=at, text=text)][-KEPT_WORDS:]

    def write(self, file: Path) -> None:
        """Replace `file` at once, readable by its owner alone. Raises OSError."""
        atomic_write(file, self.model_dump_json(indent=1) + "\n", mode=PRIVATE, durable=False)


def read_status(file: Path) -> PeerState | None:
    """Read what was last known, None where there is nothing or what is there is damaged."""
    with contextlib.suppress(OSError, ValidationError):
        return PeerState.model_validate_json(file.read_bytes())
    return None

"""What is known of one peer: its state with its reason, what it does, what was asked of it. Kept in a file.

The supervisor folds every event into it, answers `tt status` with it, and writes it beside the run's other files: what
was last known of a peer outlives a crash, and a machine that has lost its power.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.supervisor import events

KEPT_WORDS = 5


class _Part(BaseModel):
    """Fields of a later version are ignored, missing ones have their defaults."""

    model_config = ConfigDict(extra="ignore", validate_assignment=False)


class Chosen(_Part):
    """An automatic choice and its reason."""

    value: str
    reason: str


class LimitInForce(_Part):
    """A limit as it was set. source: the flag, or the settings file."""

    name: str
    value: str
    source: str


class Counted(_Part):
    """Troubles of one kind: how many since the supervisor started, and the newest."""

    count: int
    words: str
    remedy: str
    at: float


class Said(_Part):
    """A line that a person should be able to read afterwards."""

    at: float
    text: str


class PeerState(_Part):
    """One peer of this machine. Times are Unix time in seconds; bytes and restarts count from the supervisor's start.

    state: starting, syncing, training, averaging, waiting, paused, leaving or ended. until: when it will change, where
    that is known. paused, paused_until, finish: what a person has asked for. share: of the swarm's samples per second.
    """

    run: str
    identity: str
    role: Literal["trainer", "aux"]
    total_steps: int
    pid: int
    log: str = ""
    version: str = ""
    started: float
    updated: float

    state: str = "starting"
    reason: str = ""
    since: float
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
    download_received: int | None = None
    download_total: int | None = None
    restarts: int = 0

    peer_id: str = ""
    addresses: list[str] = Field(default_factory=list)
    client_mode: bool = False
    choices: dict[str, Chosen] = Field(default_factory=dict)
    limits: list[LimitInForce] = Field(default_factory=list)
    troubles: dict[str, Counted] = Field(default_factory=dict)
    words: list[Said] = Field(default_factory=list)

    def fold(self, event: events.Event) -> None:
        """Take one event in."""
        self.updated = event.at
        match event:
            case events.Phase():
                self.enter(event.phase, event.reason, event.at, event.until)
            case events.Listening():
                self.peer_id, self.addresses, self.client_mode = event.peer_id, event.addresses, event.client_mode
            case events.Choice():
                self.choices[event.what] = Chosen(value=event.value, reason=event.reason)
            case events.Progress():
                self._progress(event)
            case events.Round():
                self.last_round = event.words or event.outcome
                if event.outcome not in ("committed", "alone"):
                    self._say(event.at, event.words)
            case events.Step():
                self.step, self.loss = event.epoch, event.loss
            case events.Download():
                self.download_received, self.download_total = event.received, event.total
            case events.Synchronised():
                self.step = event.epoch
                self.download_received = self.download_total = None
            case events.Saved():
                self.saved_step = event.epoch
            case events.Snapshot():
                self.step, self.loss = event.swarm.get("epoch"), event.swarm.get("loss")
                self.peers = event.swarm.get("trainers")
                self.swarm_samples_per_second = event.swarm.get("samples_per_second")
            case events.Trouble():
                before = self.troubles.get(event.what)
                count = 1 if before is None else before.count + 1
                self.troubles[event.what] = Counted(count=count, words=event.words, remedy=event.remedy, at=event.at)
                self._say(event.at, event.words)
            case events.Log():
                self._say(event.at, event.message)
            case events.Failure():
                self._say(event.at, event.message)
            case events.Finished():
                self.enter("ended", event.reason, event.at)

    def enter(self, state: str, reason: str, at: float, until: float | None = None) -> None:
        """Be in `state`; a new reason alone does not make it begin anew."""
        if state != self.state:
            self.since = at
        self.state, self.reason, self.until = state, reason, until
        if state != "syncing":
            self.download_received = self.download_total = None
        if state in ("paused", "ended", "starting"):
            self.samples = self.target_samples = self.eta = self.peers = None
            self.samples_per_second = self.swarm_samples_per_second = self.share = None
            self._sent, self._received = self.bytes_sent, self.bytes_received

    # What workers before the present one have moved; each counts from its own start.
    _sent: int = 0
    _received: int = 0

    def _progress(self, event: events.Progress) -> None:
        self.step, self.samples, self.target_samples = event.epoch, event.samples, event.target_samples
        self.loss = self.loss if event.loss is None else event.loss
        self.eta, self.peers = event.eta, event.peers
        self.samples_per_second, self.share = event.my_samples_per_second, event.my_share
        self.swarm_samples_per_second = event.swarm_samples_per_second
        self.bytes_sent = self._sent + event.bytes_sent
        self.bytes_received = self._received + event.bytes_received
        self.rejected_micro_batches = event.rejected_micro_batches

    def _say(self, at: float, text: str) -> None:
        self.words = [*self.words, Said(at=at, text=text)][-KEPT_WORDS:]

    def write(self, file: Path) -> None:
        """Replace `file` at once, readable by its owner alone. Raises OSError."""
        atomic_write(file, self.model_dump_json(indent=1) + "\n", mode=PRIVATE, durable=False)


def read_status(file: Path) -> PeerState | None:
    """What was last known, None where there is nothing or what is there is damaged."""
    with contextlib.suppress(OSError, ValidationError):
        return PeerState.model_validate_json(file.read_bytes())
    return None


def new_status(run: str, identity: str, role: Literal["trainer", "aux"], total_steps: int, version: str) -> PeerState:
    """Of a peer that this process begins to supervise."""
    now = time.time()
    return PeerState(
        run=run,
        identity=identity,
        role=role,
        total_steps=total_steps,
        pid=os.getpid(),
        started=now,
        updated=now,
        since=now,
        version=version,
    )

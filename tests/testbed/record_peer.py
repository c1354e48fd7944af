"""A peer that publishes and reads records as a trainer does, and computes nothing: for scripts/bench records.

Its DHT node and its `PeerDirectory` are real ones; micro-batches take the time that they are told to take.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tt_cli.run import RunConfig
from tt_cli.supervisor.reporter import die_with_parent
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.dht_node import addresses_of, start_dht, stop_dht
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory

LOOK_SECONDS = 0.25  # as of a trainer's background thread
MICRO_BATCH = 8


class WallClock(Clock):
    """This machine's, by which a thread can sleep."""

    sleep = staticmethod(time.sleep)


@dataclass(frozen=True)
class Place:
    """Where one of the peers is, through whom it joins, and the seconds that a micro-batch takes there."""

    number: int
    host: str
    folder: Path
    run: RunConfig
    seconds: float
    initial_peers: list[str] = field(default_factory=list)


class RecordPeer:
    """One peer. Its methods are called by the bench. seconds: of a micro-batch. clock: its threads', with `sleep`."""

    def __init__(self, number: int, run: RunConfig, seconds: float, dht: Any, identity: Any, clock: Any):
        self._number, self._seconds, self._target = number, seconds, run.swarm.target_batch_size
        self._peer_id, self._clock = identity.peer_id, clock
        self._board = PeerDirectory(run, dht, identity, clock=clock)
        self._lock = threading.Lock()
        self._epoch, self._total, self._held = 0, 0, 0
        self._made: list[float] = []  # when each micro-batch of the next step ended
        self._due_at: float | None = None
        self._in_round = False

    def begin(self) -> int:
        """Begin to publish, to look and to compute. Returns how many others it sees."""
        self._publish()
        self._board.start()
        others = len(self._board.fresh_view().records) - 1
        for work in (self._compute, self._watch):
            self._clock.thread(work, "peer")
        return others

    def sees(self) -> int:
        """Peers that hold its state, with itself."""
        return len(self._board.view.members(*self._state))

    def due(self) -> tuple[float | None, list[float]]:
        """Since when a step is due as this peer sees it, and when each of its micro-batches for that ended."""
        return self._due_at, list(self._made)

    def round(self) -> None:
        """A round begins, with a look as where no group stands."""
        self._in_round, self._held = True, len(self._made)
        self._board.fresh_view()

    def step(self) -> None:
        """The round made the step; what was computed meanwhile counts for the next one."""
        with self._lock:
            self._epoch, self._made, self._due_at = self._epoch + 1, self._made[self._held :], None
            self._board.stepped(*self._state)
            self._publish()
            self._in_round = False

    @property
    def _state(self) -> tuple[int, str]:
        return self._epoch, hashlib.sha256(str(self._epoch).encode()).hexdigest()

    def _compute(self) -> None:
        self._clock.sleep(self._seconds * (self._number % 8) / 8)  # not all at once
        while True:
            self._clock.sleep(self._seconds)
            with self._lock:
                self._made.append(self._clock.monotonic())
                self._total += MICRO_BATCH
                self._publish()

    def _watch(self) -> None:
        """As `Collaboration` between two rounds."""
        while True:
            with self._lock:
                view, own = self._board.view, MICRO_BATCH * len(self._made)
                others = [r for r in view.members(*self._state) if r.peer_id != self._peer_id]
                missing = self._target - own - sum(record.samples for record in others)
                if missing <= 0:
                    self._due_at = self._due_at or self._clock.monotonic()
                elif not self._in_round:
                    left = max(0.0, missing - self._board.untold())
                    self._board.expect(left / max(view.samples_per_second(), 1e-9))
            self._clock.sleep(LOOK_SECONDS)

    def _publish(self) -> None:
        epoch, digest = self._state
        self._board.publish(
            PeerRecord(
                peer_id=self._peer_id,
                role="trainer",
                user=f"volunteer-{self._number}",
                version="0.1.0",
                device="NVIDIA GeForce RTX 3090",
                client_mode=False,
                epoch=epoch,
                digest=digest,
                samples=MICRO_BATCH * len(self._made),
                samples_per_second=MICRO_BATCH / self._seconds if self._total else 0.0,
                total_samples=self._total,
                micro_batch=MICRO_BATCH,
                loss=4.0 + 1 / (1 + self._total),
                figures={"text_loss": 4.0, "image_loss": 4.0},
                round=f"step {epoch} made with 11 others, 4,102 samples",
                bytes_sent=10**9 + self._total,
                bytes_received=10**9 + self._total,
                time=self._clock.dht_time(),
            )
        )


def serve(connection: Any, place: Place) -> None:
    """In a host: start the peer, then do what the bench says until it is gone."""
    die_with_parent()
    logging.disable(logging.WARNING)
    identity = claim_identity(place.folder, "trainer")
    dht = start_dht(place.run, identity, initial_peers=place.initial_peers, host=place.host)
    peer = RecordPeer(place.number, place.run, place.seconds, dht, identity, WallClock())
    connection.send(addresses_of(dht)[0])
    try:
        while True:
            connection.send(getattr(peer, connection.recv())())
    except EOFError:
        stop_dht(dht)
    os._exit(0)

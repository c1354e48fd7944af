"""The auxiliary peer's process: a fixed address and identity, the keeper, the recorder, and a screenful of facts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tt_cli import __version__
from tt_cli.auxiliary.lease import LEASE_SECONDS, Lease, LeaseFile
from tt_cli.auxiliary.recorder import RunRecorder
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.errors import TTError
from tt_cli.history.writer import DATABASE, database_url
from tt_cli.identity.passes import RollBack
from tt_cli.monitor import take_snapshot
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Finished, Listening, Log, Phase, Snapshot
from tt_cli.supervisor.processes import alive
from tt_cli.supervisor.reporter import Orders, WorkerBroken
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network.dht_node import (
    DHT,
    NobodyAnswered,
    addresses_here,
    addresses_of,
    daemon_pid,
    daemon_watched,
    dht_time,
    start_dht,
    stop_dht,
)
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory, SwarmState
from tt_cli.task import task_of

LOOK_SECONDS = 0.5
AUX_LOOK_SECONDS = 3.0  # nothing waits for an auxiliary peer
SNAPSHOT_SECONDS = 2.0
LARGE_SNAPSHOT_PEERS, LARGE_SNAPSHOT_SECONDS = 200, 10.0  # so many are written less often
HISTORY_SECONDS = 5.0
FIRST_PHASE = ("waiting", "for trainers")


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options that `tt aux-peer` hands its process, beside the run (TOML text)."""

    run: str
    port: int
    initial_peers: list[str] = field(default_factory=list)
    host: str = "0.0.0.0"
    announce: list[str] = field(default_factory=list)
    user: str = ""


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Serve until it is asked to leave."""
    opts = CoordinatorOptions(**options)
    run = RunConfig.from_toml(opts.run, "the run file")
    folder = folders.run_folder(run)
    identity = claim_identity(folder, "aux")
    keeper = StateKeeper(run, emit)
    database = database_url(folder, os.environ.get(DATABASE, ""))
    recorder = RunRecorder(run, database, lambda words, level: emit(Log(words, level)))
    emit(Phase("starting", "joining the DHT"))
    dht = _join(run, identity, opts, emit)
    with ExitStack() as closing:
        closing.callback(recorder.close)
        closing.callback(stop_dht, dht)
        closing.enter_context(daemon_watched(dht))
        hand_over, read_tree = keeper.hand_over, keeper.read_tree
        averager = Averager(run, dht, identity.key, {}, source=hand_over, read_tree=read_tree)
        directory = PeerDirectory(run, dht, identity)
        closing.callback(_close, directory, averager)
        directory.expect(AUX_LOOK_SECONDS)
        addresses = addresses_of(dht)
        closing.callback(_forget, folder / "address")
        emit(Listening(identity.peer_id, addresses, False))
        _write_addresses(folder / "address", addresses_here(dht), emit)
        go_back = partial(_go_back, keeper, recorder)
        followed = OrganiserOrders(membership_at(dht), identity.path.with_suffix(".era"), leave=go_back)
        named = [address.rpartition("/p2p/")[2] for address in run.peers.initial if "/p2p/" in address]
        lease = Lease(identity.peer_id, named, min(LEASE_SECONDS, run.swarm.statistics_expiration))
        coordinator = Coordinator(
            run=run,
            emit=emit,
            keeper=keeper,
            recorder=recorder,
            directory=directory,
            averager=averager,
            orders=followed,
            lease=lease,
            lease_file=LeaseFile(folder),
            peer_id=identity.peer_id,
            user=opts.user,
        )
        closing.callback(coordinator.lease_file.forget)
        directory.start()
        recorder.put("model", task_of(run).sizes())
        recorder.put("addresses", addresses)
        emit(Phase(*FIRST_PHASE))
        daemon = daemon_pid(dht)
        while not orders.leave.wait(LOOK_SECONDS):
            coordinator.look()
            _check_alive(averager, daemon)
        emit(Finished("left"))


def _join(run: RunConfig, identity: Identity, opts: CoordinatorOptions, emit: Emit) -> DHT:
    """The DHT through the other aux peers; alone when none of them answers: somebody must be the first."""
    others = [address for address in opts.initial_peers if not address.endswith(f"/p2p/{identity.peer_id}")]
    try:
        return start_dht(run, identity, initial_peers=others, host=opts.host, port=opts.port, announce=opts.announce)
    except NobodyAnswered as error:
        emit(Log(f"{error}; starting without them", "warning"))
        return start_dht(run, identity, initial_peers=[], host=opts.host, port=opts.port, announce=opts.announce)


def _write_addresses(file: Path, addresses: list[str], emit: Emit) -> None:
    """For peers and monitors on this machine, which find this peer by it; it serves without it too."""
    try:
        file.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    except OSError as error:
        words = f"cannot write {file}: {error.strerror or error}; on this machine too, others need --peer"
        emit(Log(words, "error"))


def _forget(address_file: Path) -> None:
    with contextlib.suppress(OSError):
        address_file.unlink(missing_ok=True)


def _go_back(keeper: StateKeeper, recorder: RunRecorder, order: RollBack) -> None:
    """Leave what came after the step of an order: it is no part of the run any more."""
    keeper.go_back(order)
    recorder.go_back(order.step, order.order)


def phase_of(records: Iterable[PeerRecord]) -> tuple[str, str]:
    """Name the phase of this peer and its reason; say so where nobody can make a step."""
    records = list(records)
    trainers = sum(record.role == "trainer" for record in records)
    if not trainers:
        return "waiting", "for trainers"
    words = f"{trainers} trainer{'' if trainers == 1 else 's'}"
    if any(record.averages and not record.client_mode for record in records):
        return "serving", words
    return (
        "waiting",
        f"for one who accepts connections: {words} in client mode, so no step is made; the assistant helps (--assist)",
    )


@dataclass
class Coordinator:
    """The auxiliary peer's own work, one look at the swarm after the other.

    directory: the peers' records. orders: the organiser's, which are followed here. peer_id, user: this peer's.
    """

    run: RunConfig
    emit: Emit
    keeper: StateKeeper
    recorder: RunRecorder
    directory: PeerDirectory
    averager: Averager
    orders: OrganiserOrders
    lease: Lease
    lease_file: LeaseFile
    peer_id: str
    user: str
    _told_at: float = -float("inf")  # of the snapshot, the history and the database's snapshot: when they were due last
    _remembered_at: float = -float("inf")
    _written_at: float = -float("inf")
    _leader: str = ""
    _fetching: threading.Thread | None = None
    _phase: tuple[str, str] = FIRST_PHASE
    _failed: str = ""

    def look(self) -> None:
        """Record, fetch and tell what is due."""
        busy = self._fetching is not None and self._fetching.is_alive()
        if (order := self.orders.due) and not busy:
            self._go_back(order)
        swarm = self.directory.view
        self._look_for_leader(swarm)
        self._publish()
        self.recorder.record(swarm)
        if not busy and self.keeper.wants(swarm):  # it may take minutes
            self._fetching = threading.Thread(target=self.keeper.fetch, args=(self.averager,), daemon=True)
            self._fetching.start()
        self._tell(swarm)

    def _look_for_leader(self, swarm: SwarmState) -> None:
        now = dht_time()
        fresh = [record for record in swarm.records if record.role == "aux" and record.time > now - self.lease.lasts]
        self.lease.look({record.peer_id: record.lease for record in fresh}, now)
        self.lease_file.write(self.lease.holder, self.lease.holder == self.peer_id)
        holder = self.lease.holder
        if holder and holder != self._leader and (self._leader or len(fresh) > 1):  # of one alone there is no word
            words = "this auxiliary peer" if holder == self.peer_id else f"…{holder[-6:]}"
            self.emit(Log(f"{words} leads: it publishes for all auxiliary peers of the run"))
            self._leader = holder

    def _go_back(self, order: RollBack) -> None:
        try:
            self.orders.done(order)
            self.emit(Log(f"the organiser took the run back to step {order.step}; holding step {self.keeper.epoch}"))
        except (TTError, OSError) as error:
            self._fail(f"cannot go back to step {order.step}, as the organiser ordered: {error}")

    def _fail(self, words: str) -> None:
        """Tell what stays due, and is tried at every look, once."""
        if words != self._failed:
            self._failed = words
            self.emit(Log(words, "error"))

    def _publish(self) -> None:
        self.directory.publish(
            PeerRecord(
                peer_id=self.peer_id,
                role="aux",
                user=self.user,
                version=__version__,
                client_mode=False,
                epoch=self.keeper.epoch,
                digest=self.keeper.digest,
                samples=0,
                samples_per_second=0.0,
                total_samples=0,
                era=self.orders.era,
                lease=self.lease.since if self.lease.candidate else None,
                bytes_sent=int(self.averager.traffic[0]),
                bytes_received=int(self.averager.traffic[1]),
                time=dht_time(),
            )
        )

    def _tell(self, swarm: SwarmState) -> None:
        now = time.monotonic()
        if now > self._remembered_at + HISTORY_SECONDS:
            self._remembered_at = now
            self.directory.publish_history(self.recorder.history())
        if now < self._told_at + SNAPSHOT_SECONDS:
            return
        self._told_at = now
        snapshot = take_snapshot(self.run, list(swarm.records), self.recorder.history(), dht_time())
        fields = snapshot.to_json()
        self.emit(Snapshot(fields))
        if now >= self._written_at + (LARGE_SNAPSHOT_SECONDS if len(swarm.records) > LARGE_SNAPSHOT_PEERS else 0.0):
            self._written_at = now
            self.recorder.put("snapshot", {key: value for key, value in fields.items() if key != "history"})
        phase = ("waiting", paused) if (paused := self.orders.paused) else phase_of(swarm.records)
        if phase != self._phase:
            self._phase = phase
            self.emit(Phase(*phase))


def _check_alive(averager: Averager, daemon: int | None) -> None:
    if daemon is not None and not alive(daemon):
        raise WorkerBroken("the p2p daemon of this peer was ended by something else")
    if not averager.is_alive():
        raise WorkerBroken("the averager process of this peer was ended by something else")


def _close(directory: PeerDirectory, averager: Averager) -> None:
    if directory.is_alive():
        directory.stop()
    averager.shutdown()
    if averager.is_alive():
        averager.kill()

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
from tt_cli.auxiliary.history.writer import DATABASE, database_url
from tt_cli.auxiliary.lease import LEASE_SECONDS, Lease, LeaseFile
from tt_cli.auxiliary.recorder import RunRecorder
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.errors import TTError
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


@dataclass(frozen=True)
class CoordinatorOptions:
    """What `tt aux-peer` hands its process, beside the run (TOML text)."""

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
        board = PeerDirectory(run, dht, identity)
        closing.callback(_close, board, averager)
        board.expect(AUX_LOOK_SECONDS)
        addresses = addresses_of(dht)
        closing.callback(_forget, folder / "address")
        emit(Listening(identity.peer_id, addresses, False))
        _write_addresses(folder / "address", addresses_here(dht), emit)
        steering = OrganiserOrders(
            membership_at(dht),
            identity.path.with_suffix(".era"),
            leave=partial(_leave, keeper, recorder),
        )
        named = [address.rpartition("/p2p/")[2] for address in run.peers.initial if "/p2p/" in address]
        lasts = min(LEASE_SECONDS, run.swarm.statistics_expiration)
        lease = Lease(identity.peer_id, named, lasts), LeaseFile(folder)
        closing.callback(lease[1].forget)
        serve = _Service(run, emit, keeper, recorder, board, averager, steering, lease, identity.peer_id, opts.user)
        board.start()
        recorder.put("model", task_of(run).sizes())
        recorder.put("addresses", addresses)
        emit(Phase("waiting", "for trainers"))
        daemon = daemon_pid(dht)
        while not orders.leave.wait(LOOK_SECONDS):
            serve.look()
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


def _leave(keeper: StateKeeper, recorder: RunRecorder, order: RollBack) -> None:
    """What came after the step of an order is no part of the run any more."""
    keeper.go_back(order)
    recorder.go_back(order.step, order.order)


def phase_of(records: Iterable[PeerRecord]) -> tuple[str, str]:
    """What the swarm lets this peer do, and why; says so where nobody can make a step."""
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


class _Service:
    """One look at the swarm after the other."""

    def __init__(
        self,
        run: RunConfig,
        emit: Emit,
        keeper: StateKeeper,
        recorder: RunRecorder,
        board: PeerDirectory,
        averager: Averager,
        steering: OrganiserOrders,
        lease: tuple[Lease, LeaseFile],
        peer_id: str,
        user: str,
    ):
        self._run, self._emit, self._keeper, self._recorder = run, emit, keeper, recorder
        self._board, self._averager, self._peer_id, self._user = board, averager, peer_id, user
        self._told_at = self._remembered_at = self._written_at = -float("inf")
        self._steering = steering
        self._lease, self._lease_file = lease
        self._leader = ""
        self._fetching: threading.Thread | None = None
        self._phase: tuple[str, str] = ("waiting", "for trainers")
        self._failed = ""

    def look(self) -> None:
        """Record, fetch and tell what is due."""
        busy = self._fetching is not None and self._fetching.is_alive()
        if (order := self._steering.due) and not busy:
            self._go_back(order)
        view = self._board.view
        self._look_for_leader(view)
        self._publish()
        self._recorder.record(view)
        if not busy and self._keeper.wants(view):  # it may take minutes
            self._fetching = threading.Thread(target=self._keeper.fetch, args=(self._averager,), daemon=True)
            self._fetching.start()
        self._tell(view)

    def _look_for_leader(self, view: SwarmState) -> None:
        now = dht_time()
        fresh = [one for one in view.records if one.role == "aux" and one.time > now - self._lease.lasts]
        self._lease.look({one.peer_id: one.lease for one in fresh}, now)
        self._lease_file.write(self._lease.holder, self._lease.holder == self._peer_id)
        holder = self._lease.holder
        if holder and holder != self._leader and (self._leader or len(fresh) > 1):  # of one alone there is no word
            words = "this auxiliary peer" if holder == self._peer_id else f"…{holder[-6:]}"
            self._emit(Log(f"{words} leads: it publishes for all auxiliary peers of the run"))
            self._leader = holder

    def _go_back(self, order: RollBack) -> None:
        try:
            self._steering.done(order)
            self._emit(Log(f"the organiser took the run back to step {order.step}; holding step {self._keeper.epoch}"))
        except (TTError, OSError) as error:
            self._fail(f"cannot go back to step {order.step}, as the organiser ordered: {error}")

    def _fail(self, words: str) -> None:
        """Tell what stays due, and is tried at every look, once."""
        if words != self._failed:
            self._failed = words
            self._emit(Log(words, "error"))

    def _publish(self) -> None:
        self._board.publish(
            PeerRecord(
                peer_id=self._peer_id,
                role="aux",
                user=self._user,
                version=__version__,
                client_mode=False,
                epoch=self._keeper.epoch,
                digest=self._keeper.digest,
                samples=0,
                samples_per_second=0.0,
                total_samples=0,
                era=self._steering.era,
                lease=self._lease.since if self._lease.candidate else None,
                bytes_sent=int(self._averager.traffic[0]),
                bytes_received=int(self._averager.traffic[1]),
                time=dht_time(),
            )
        )

    def _tell(self, view: SwarmState) -> None:
        now = time.monotonic()
        if now > self._remembered_at + HISTORY_SECONDS:
            self._remembered_at = now
            self._board.publish_history(self._recorder.history())
        if now < self._told_at + SNAPSHOT_SECONDS:
            return
        self._told_at = now
        snapshot = take_snapshot(self._run, list(view.records), self._recorder.history(), dht_time())
        told = snapshot.to_json()
        self._emit(Snapshot(told))
        if now >= self._written_at + (LARGE_SNAPSHOT_SECONDS if len(view.records) > LARGE_SNAPSHOT_PEERS else 0.0):
            self._written_at = now
            self._recorder.put("snapshot", {key: value for key, value in told.items() if key != "history"})
        phase = ("waiting", paused) if (paused := self._steering.paused) else phase_of(view.records)
        if phase != self._phase:
            self._phase = phase
            self._emit(Phase(*phase))


def _check_alive(averager: Averager, daemon: int | None) -> None:
    if daemon is not None and not alive(daemon):
        raise WorkerBroken("the p2p daemon of this peer was ended by something else")
    if not averager.is_alive():
        raise WorkerBroken("the averager process of this peer was ended by something else")


def _close(board: PeerDirectory, averager: Averager) -> None:
    if board.is_alive():
        board.stop()
    averager.shutdown()
    if averager.is_alive():
        averager.kill()

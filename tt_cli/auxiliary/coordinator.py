"""The auxiliary peer's process: a fixed address and identity, the keeper, the recorder, and a screenful of facts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tt_cli.auxiliary.lease import LEASE_SECONDS, Lease, LeaseFile
from tt_cli.auxiliary.member import AuxiliaryMember
from tt_cli.auxiliary.parts import remove_quietly, run_of
from tt_cli.auxiliary.recorder import RunRecorder
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.identity.passes import RollBack
from tt_cli.memory.answer_tables import RUN, Tables
from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.peer.swarm_peer import PeerOptions, prepare_arithmetic
from tt_cli.run import DalleRun, RunConfig, folders
from tt_cli.supervisor.events import Emit, Finished, Listening, Log, Phase, Snapshot
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network import dht_node
from tt_cli.swarm.network.dht_node import DHT, dht_time
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory, SwarmState
from tt_cli.swarm.records.snapshot import take_snapshot
from tt_cli.task import task_of

LOOK_SECONDS = 0.5
SNAPSHOT_SECONDS = 2.0
LARGE_SNAPSHOT_PEERS, LARGE_SNAPSHOT_SECONDS = 200, 10.0  # so many are written less often
HISTORY_SECONDS = 5.0

StartDHT = Callable[..., DHT]  # as `dht_node.start_dht`


def main(options: dict[str, Any], emit: Emit, orders: Orders, start_dht: StartDHT = dht_node.start_dht) -> None:
    """Serve until it is asked to leave."""
    run, database = run_of(options)
    prepare_arithmetic(run, emit)
    with ExitStack() as closing:
        coordinator = Coordinator(run, PeerOptions(**options), database, emit, closing, start_dht)
        while not orders.leave.wait(LOOK_SECONDS):
            coordinator.look()
            coordinator.lifelines.check()
        emit(Finished("left"))


class Coordinator:
    """The auxiliary peer's own work, one look at the swarm after the other. What it begins ends with `closing`."""

    def __init__(
        self, run: RunConfig, opts: PeerOptions, database: str, emit: Emit, closing: ExitStack, start_dht: StartDHT
    ):
        folder = folders.run_folder(run)
        identity = claim_identity(folder, "aux")
        self._run, self._emit = run, emit
        self._keeper = keeper = StateKeeper(run, emit)
        self._recorder = RunRecorder(run, database, lambda line, level: emit(Log(line, level)))
        closing.callback(self._recorder.close)
        emit(Phase("starting", "joining the DHT"))
        dht = _join(run, identity, opts, emit, start_dht)
        closing.callback(dht_node.stop_dht, dht)
        closing.enter_context(dht_node.daemon_watched(dht))
        shapes, read_tree = keeper.trained.shapes(), keeper.trained.read_tree
        averager = Averager(run, dht, identity, shapes, source=keeper.hand_over, read_tree=read_tree)
        closing.callback(averager.end)
        self._directory = PeerDirectory(run, dht, identity)
        closing.callback(self._directory.stop)
        addresses = dht_node.addresses_of(dht)
        closing.callback(remove_quietly, folder / "address")
        emit(Listening(identity.peer_id, addresses, False))
        _write_addresses(folder / "address", dht_node.addresses_here(dht), emit)
        self._membership = membership_at(dht)
        self._orders = OrganiserOrders(self._membership, identity.path.with_suffix(".era"), leave=self._leave)
        lease = Lease(identity.peer_id, run.peers.named, min(LEASE_SECONDS, run.swarm.statistics_expiration))
        self._lease_file = LeaseFile(folder)
        closing.callback(remove_quietly, self._lease_file.path)
        self.lifelines = Lifelines(averager)
        # When the snapshot, the history and the database's snapshot were due last.
        self._told_at = self._remembered_at = self._written_at = -float("inf")
        self._phase = phase_of(())
        self._member = AuxiliaryMember(run, keeper, averager, self._directory, self._orders, lease, opts.user, emit)
        self._recorder.put("model", task_of(run).sizes())
        self._recorder.put("addresses", addresses)
        if not isinstance(run, DalleRun):  # torch takes some seconds for it, and the page's process loads none
            threading.Thread(target=self._make_table, daemon=True).start()
        emit(Phase(*self._phase))

    def look(self) -> None:
        """Record and tell what is due. Raises what broke the state."""
        swarm, lease = self._member.look(), self._member.lease
        self._lease_file.write(lease.holder, bool(lease.since))
        self._recorder.record(swarm)
        self._tell(swarm)

    def _make_table(self) -> None:
        self._recorder.put("calculator", Tables(self._run, self._run.run.name, task_of).table(RUN))

    def _leave(self, order: RollBack) -> None:
        """What came after the step of an order is no part of the run any more."""
        self._keeper.go_back(order)
        self._recorder.go_back(order.step, order.order)

    def _tell(self, swarm: SwarmState) -> None:
        now = time.monotonic()
        if now > self._remembered_at + HISTORY_SECONDS:
            self._remembered_at = now
            self._directory.publish_history(self._recorder.history())
        if now < self._told_at + SNAPSHOT_SECONDS:
            return
        self._told_at = now
        history, notice = self._recorder.history(), self._membership.notice()
        snapshot = take_snapshot(self._run, list(swarm.records), history, dht_time(), notice)
        fields = snapshot.to_json()
        self._emit(Snapshot(fields))
        if now >= self._written_at + (LARGE_SNAPSHOT_SECONDS if len(swarm.records) > LARGE_SNAPSHOT_PEERS else 0.0):
            self._written_at = now
            self._recorder.put("snapshot", {key: value for key, value in fields.items() if key != "history"})
        phase = ("waiting", paused) if (paused := self._orders.paused) else phase_of(swarm.records)
        if phase != self._phase:
            self._phase = phase
            self._emit(Phase(*phase))


def _join(run: RunConfig, identity: Identity, opts: PeerOptions, emit: Emit, start_dht: StartDHT) -> DHT:
    """The DHT through the other aux peers; alone when none of them answers: somebody must be the first."""
    others = [address for address in opts.initial_peers if not address.endswith(f"/p2p/{identity.peer_id}")]
    start = partial(start_dht, run, identity, host=opts.host, port=opts.port, announce=opts.announce)
    try:
        return start(initial_peers=others)
    except dht_node.WrongAnswers:
        raise
    except dht_node.NobodyAnswered as error:
        emit(Log(f"{error}; starting without them", "warning"))
        return start(initial_peers=[])


def _write_addresses(file: Path, addresses: list[str], emit: Emit) -> None:
    """For peers and monitors on this machine, which find this peer by it; it serves without it too."""
    try:
        file.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    except OSError as error:
        trouble = f"cannot write {file}: {error.strerror or error}"
        emit(Log(f"{trouble}; on this machine too, others need --peer", "error"))


def phase_of(records: Sequence[PeerRecord]) -> tuple[str, str]:
    """Name the phase of this peer and its reason; say so where nobody can make a step."""
    trainers = sum(record.role == "trainer" for record in records)
    if not trainers:
        return "waiting", "for trainers"
    who = f"{trainers} trainer{'' if trainers == 1 else 's'}"
    if any(record.averages and not record.client_mode for record in records):
        return "serving", who
    obstacle = f"{who} in client mode, so no step is made; the assistant helps (--assist)"
    return "waiting", f"for one who accepts connections: {obstacle}"

"""The auxiliary peer's process: a fixed address and identity, the keeper, the recorder, and a screenful of facts."""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tt_cli import __version__
from tt_cli.auxiliary.keeper import Keeper
from tt_cli.auxiliary.recorder import Recorder
from tt_cli.errors import TTError
from tt_cli.monitor import take_snapshot
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Finished, Listening, Log, Phase, Snapshot
from tt_cli.supervisor.processes import alive
from tt_cli.supervisor.worker import Orders, WorkerBroken
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.board import Board, View
from tt_cli.swarm.dht import (
    DHT,
    NobodyAnswered,
    addresses_of,
    daemon_pid,
    daemon_watched,
    dht_time,
    start_dht,
    stop_dht,
)
from tt_cli.swarm.identity import Identity, claim_identity
from tt_cli.swarm.records import PeerRecord

LOOK_SECONDS = 0.5
AUX_LOOK_SECONDS = 3.0  # nothing waits for an auxiliary peer
SNAPSHOT_SECONDS = 2.0
HISTORY_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """What `tt aux-peer` hands its process, beside the run (TOML text)."""

    run: str
    port: int
    initial_peers: list[str] = field(default_factory=list)
    host: str = "0.0.0.0"
    announce: list[str] = field(default_factory=list)
    user: str = ""


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Serve until it is asked to leave."""
    opts = Options(**options)
    run = RunConfig.from_toml(opts.run, "the run file")
    folder = folders.run_folder(run)
    identity = claim_identity(folder, "aux")
    keeper, recorder = Keeper(run, emit), Recorder(folder)
    emit(Phase("starting", "joining the DHT"))
    dht = _join(run, identity, opts, emit)
    with ExitStack() as closing:
        closing.callback(stop_dht, dht)
        closing.enter_context(daemon_watched(dht))
        averager = Averager(run, dht, {}, source=keeper.hand_over, read_tree=keeper.read_tree, client_mode=False)
        board = Board(run, dht, identity)
        closing.callback(_close, board, averager)
        board.expect(AUX_LOOK_SECONDS)
        addresses = addresses_of(dht)
        closing.callback(_forget, folder / "address")
        emit(Listening(identity.peer_id, addresses, False))
        _write_addresses(folder / "address", addresses, emit)
        serve = _Service(run, emit, keeper, recorder, board, averager, identity.peer_id, opts.user)
        board.start()
        emit(Phase("waiting", "for trainers"))
        daemon = daemon_pid(dht)
        while not orders.leave.wait(LOOK_SECONDS):
            serve.look()
            _check_alive(averager, daemon)
        emit(Finished("left"))


def _join(run: RunConfig, identity: Identity, opts: Options, emit: Emit) -> DHT:
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


class _Service:
    """One look at the swarm after the other."""

    def __init__(
        self,
        run: RunConfig,
        emit: Emit,
        keeper: Keeper,
        recorder: Recorder,
        board: Board,
        averager: Averager,
        peer_id: str,
        user: str,
    ):
        self._run, self._emit, self._keeper, self._recorder = run, emit, keeper, recorder
        self._board, self._averager, self._peer_id, self._user = board, averager, peer_id, user
        self._told_at = self._remembered_at = -float("inf")
        self._trainers = 0
        self._not_recorded = ""

    def look(self) -> None:
        """Record, fetch and tell what is due."""
        self._publish()
        view = self._board.view
        try:
            self._recorder.record(view)
        except TTError as error:  # it stays due, and is tried at every look: told once for each step
            if str(error) != self._not_recorded:
                self._not_recorded = str(error)
                self._emit(Log(str(error), "error"))
        if self._keeper.wants(view):
            self._keeper.fetch(self._averager)
            self._publish()
        self._tell(view)

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
                bytes_sent=int(self._averager.traffic[0]),
                bytes_received=int(self._averager.traffic[1]),
                time=dht_time(),
            )
        )

    def _tell(self, view: View) -> None:
        now = time.monotonic()
        if now > self._remembered_at + HISTORY_SECONDS:
            self._remembered_at = now
            self._board.publish_history(self._recorder.history())
        if now < self._told_at + SNAPSHOT_SECONDS:
            return
        self._told_at = now
        snapshot = take_snapshot(self._run, list(view.records), self._recorder.history(), dht_time())
        self._emit(Snapshot(snapshot.to_json()))
        trainers = sum(record.role == "trainer" for record in view.records)
        if trainers != self._trainers:
            self._trainers = trainers
            reason = f"{trainers} trainer{'' if trainers == 1 else 's'}" if trainers else "for trainers"
            self._emit(Phase("serving" if trainers else "waiting", reason))


def _check_alive(averager: Averager, daemon: int | None) -> None:
    if daemon is not None and not alive(daemon):
        raise WorkerBroken("the p2p daemon of this peer was ended by something else")
    if not averager.is_alive():
        raise WorkerBroken("the averager process of this peer was ended by something else")


def _close(board: Board, averager: Averager) -> None:
    if board.is_alive():
        board.stop()
    averager.shutdown()
    if averager.is_alive():
        averager.kill()

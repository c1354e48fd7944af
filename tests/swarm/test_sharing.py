"""A state through both processes of two peers: hivemind's averagers, the DHT and signed records, without rounds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.conftest import tiny_run
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from testbed.stopping import stop

from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.run import RunConfig
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.dht_node import addresses_of, dht_time, start_dht, stop_dht
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory
from tt_cli.swarm.state.bridge import NoState, ReceivedState, StateBuffer

pytestmark = pytest.mark.slow

MEGABYTE = 2**20
SHAPES = {"bias": (300,), "weight": (3 * MEGABYTE // 4 + 5,)}


class Peer:
    """Holds `state`, which its averager copied `copies` times; `hold` makes it sign another one."""

    copies = 0

    def __init__(self, run: RunConfig, folder: Path, known: list[str], stack: ExitStack, **ways: Any):
        self.run, self.identity = run, claim_identity(folder, "trainer")
        self.state: TrainingState | None = None
        client, line = ways.get("client_mode", bool(known)), ways.get("line")
        self.dht = start_dht(run, self.identity, initial_peers=known, host="127.0.0.1", client_mode=client)
        stack.callback(stop_dht, self.dht)
        read_tree = partial(StateTree.parse, identity=run.identity, shapes=SHAPES)
        self.averager = Averager(run, self.dht, self.identity, {}, source=self._source, read_tree=read_tree, line=line)
        stack.callback(self.averager.shutdown)
        self.board = PeerDirectory(run, self.dht, self.identity)
        self.board.start()
        stack.callback(self.board.stop)

    def _source(self) -> tuple[bytes, StateBuffer] | None:
        self.copies += 1
        if self.state is None:
            return None
        tree, buffer = self.state.tree(), StateBuffer.new()
        self.state.write_into(tree, buffer.write)
        return tree.manifest(), buffer

    def hold(self, step: int, seed: int) -> TrainingState:
        torch.manual_seed(seed)
        parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.state = TrainingState(step, parameters, {"v/bias": torch.rand(300)}, "", self.run.identity)
        self.board.publish(record_of(self.identity, self.state))
        self.board.fresh_view()
        return self.state

    def take(self, own: TrainingState | None = None) -> ReceivedState:
        return self.averager.take_state(None if own is None else own.tree(), 60.0)


def record_of(identity: Identity, state: TrainingState) -> PeerRecord:
    usual = {"role": "trainer", "client_mode": False, "samples": 0, "samples_per_second": 1.0, "total_samples": 0}
    facts = {"peer_id": identity.peer_id, "epoch": state.step, "digest": state.digest(), "time": dht_time()}
    return PeerRecord.model_validate({**usual, **facts})


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """A donor, and a taker in client mode."""
    others.update(state_buffers())  # that tests before these still hold
    run = tiny_run()
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("tt_cli.swarm.averager.PULSE_SECONDS", 0.001)
        donor = Peer(run, tmp_path_factory.mktemp("donor"), [], stack)
        taker = Peer(run, tmp_path_factory.mktemp("taker"), addresses_of(donor.dht), stack)
        yield [donor, taker]


others: set[str] = set()


def state_buffers(process: int | str = "self") -> set[str]:
    """Descriptors of state buffers that a process holds, this one unless it is named."""
    links = {path.name: os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()}
    return {descriptor for descriptor, link in links.items() if "tt-state" in link}


def frees_all(averager: Averager) -> bool:
    """Tell whether its process comes to hold none, before long."""
    deadline = time.monotonic() + 20.0
    while (held := state_buffers(averager.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not held


def memory_files() -> int:
    """State buffers that these tests hold."""
    return len(state_buffers() - others)


def test_a_state_passes_through_four_processes_and_this_one_keeps_no_copy(peers: list[Peer]) -> None:
    donor, taker = peers
    sent = donor.hold(3, seed=3)
    size = sum(tensor.nbytes for tensor in (*sent.parameters.values(), *sent.optimizer.values()))
    taken = taker.take()
    with taken.chunks as chunks:
        found = received_state(taken.tree, chunks.whole(), "")
        assert (found.step, found.digest()) == (3, sent.digest())
    assert taken.donors == (donor.identity.peer_id,) and taken.refused == {}
    assert taker.averager.traffic[1].item() == donor.averager.traffic[0].item() == taken.received == size
    del found  # its tensors are in that memory
    assert memory_files() == 0 and frees_all(taker.averager)


def give_up(received: int, total: int, donors: int) -> None:
    assert received == total == 0
    raise NoState("given up")


def test_it_ends_in_time_though_the_donor_does_not_answer(peers: list[Peer]) -> None:
    donor, taker = peers
    donor.hold(6, seed=6)
    stop(donor.averager.pid)
    try:
        with pytest.raises(NoState, match="nothing came for 2 s"):
            taker.averager.take_state(None, 2.0)
        with pytest.raises(NoState, match="given up"):
            taker.averager.take_state(None, 60.0, give_up)
        assert frees_all(taker.averager), "it waits for the donor no more"
    finally:
        os.kill(donor.averager.pid, signal.SIGCONT)
    assert memory_files() == 0
    with taker.take().chunks as chunks:
        assert len(chunks) == 6


def test_who_finds_no_place_takes_from_who_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.swarm.state.server.MAX_TAKERS", 1)
    run, folders = tiny_run(), [tmp_path / name for name in ("donor", "one", "other")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        donor = Peer(run, folders[0], [], stack, line=BandwidthLimiter(max_upload=8e6))
        known = addresses_of(donor.dht)
        one, other = (Peer(run, folder, known, stack, client_mode=False) for folder in folders[1:])
        sent = donor.hold(3, seed=3)
        first = pool.submit(one.take)
        while not one.averager.traffic[1].item():
            time.sleep(0.01)
        for taken in (other.take(), first.result()):
            with taken.chunks as chunks:
                assert received_state(taken.tree, chunks.whole(), "").digest() == sent.digest()
        assert one.averager.traffic[0] == taken.received == donor.averager.traffic[0], "each sent it once"
        assert one.copies == 0, "from the memory in which it took it"
        assert frees_all(other.averager), "nobody takes it from there"


def test_hivemind_s_own_door_is_closed(peers: list[Peer]) -> None:
    donor, taker = peers
    donor.hold(7, seed=7)
    before = donor.copies

    async def ask() -> list[Any]:
        p2p = await taker.dht.replicate_p2p()
        PassGuard(membership_at(taker.dht)).guard_calls(p2p)
        stub = Averager.get_stub(p2p, PeerID.from_base58(donor.identity.peer_id), namespace=donor.run.identity)
        answer = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        async with asyncio.timeout(20.0):  # without a pass it would be hung up on, which looks the same
            return [message async for message in answer]

    assert asyncio.run(ask()) == [] and donor.copies == before


def test_an_averagers_process_shows_that_it_lives(peers: list[Peer]) -> None:
    """Also that of a peer in client mode."""
    for peer in peers:
        before = float(peer.averager.pulse[0])
        there_and_back = (peer.averager.fetch_average([], "5_aa", timeout=60.0) for _ in range(1000))
        assert any(found is None and float(peer.averager.pulse[0]) > before for found in there_and_back)


def test_what_threads_tell_an_averagers_process_at_once_arrives_whole(peers: list[Peer]) -> None:
    """Such as a manifest, which a pipe takes in parts: another message between them would end that process."""
    donor, taker = peers
    sent, long = donor.hold(8, seed=8), {"nobody": ["a" * 46] * 10_000}
    with ThreadPoolExecutor(3) as threads:
        told = [threads.submit(taker.averager.show_proofs, long) for _ in range(40)]
        told += [threads.submit(taker.averager.drop_fetch) for _ in range(400)]
        assert not [each.exception() for each in told if each.exception()]
    with (taken := taker.take()).chunks as chunks:
        assert received_state(taken.tree, chunks.whole(), "").digest() == sent.digest()

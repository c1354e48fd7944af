"""A state from one libp2p node to another: what arrives, what is refused, and where it goes on after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import runtime_pb2
from hypothesis import given
from hypothesis import strategies as st
from swarm_units.made import record

from tt_cli.checkpoint import CHUNK, StateTree, TrainingState, received_state
from tt_cli.swarm import donor as donor_room
from tt_cli.swarm import signatures as signatures_room
from tt_cli.swarm import taker as taker_room
from tt_cli.swarm.buffer import StateBuffer
from tt_cli.swarm.donor import StateDonor, Unavailable, request_in
from tt_cli.swarm.records import PeerRecord
from tt_cli.swarm.signatures import Signatures
from tt_cli.swarm.taker import Chunks, NoState, Refused, Taker, answer_in, ask_over, printable, request_of

RUN = "run-1a2b3c4d"
SHAPES = {"bias": (300,), "weight": (5 * CHUNK // 8 + 77,)}  # of which the weight has three chunks


def state(step: int = 5, seed: int = 0) -> TrainingState:
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    codes = torch.randint(0, 256, SHAPES["weight"], dtype=torch.uint8, generator=generator)
    return TrainingState(
        step, parameters, {"m.codes/weight": codes, "v/bias": torch.rand(300, generator=generator)}, "", RUN
    )


read_tree = partial(StateTree.parse, identity=RUN, shapes=SHAPES)


def copy_of(one: TrainingState) -> tuple[bytes, StateBuffer]:
    tree, buffer = one.tree(), StateBuffer.new()
    one.write_into(tree, buffer.write)
    return tree.manifest(), buffer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time between two looks and two attempts than for people."""
    monkeypatch.setattr(signatures_room, "SIGNATURE_SECONDS", 0.1)
    monkeypatch.setattr(taker_room, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(donor_room, "LINGER_SECONDS", 5.0)


class Node:
    """A libp2p node that hands out `state`; change it to make a step. calls: copies made. sent: bytes handed out."""

    def __init__(self, p2p: P2P, held: TrainingState | None):
        self.p2p, self.state = p2p, held
        self.peer_id = p2p.peer_id.to_base58()
        self.calls = self.sent = 0
        self.on_sent: Callable[[Node], None] = lambda node: None
        self.change: Callable[[bytes, StateBuffer], tuple[bytes, StateBuffer]] = lambda *offered: offered
        self.donor = StateDonor(self._offer, read_tree, self._count)

    async def _offer(self) -> tuple[bytes, StateBuffer] | None:
        self.calls += 1
        return None if self.state is None else self.change(*copy_of(self.state))

    def _count(self, count: int) -> None:
        self.sent += count
        self.on_sent(self)

    def record(self, **changes: object) -> PeerRecord:
        assert self.state is not None
        return record(self.peer_id, **{"epoch": self.state.step, "digest": self.state.digest(), **changes})


class Network:
    """Nodes that know each other, and what their members sign."""

    def __init__(self, stack: AsyncExitStack):
        self.stack = stack
        self.taking: P2P | None = None
        self.nodes: list[Node] = []
        self.signed: list[PeerRecord] | None = None  # None: each node its own state

    async def node(self, held: TrainingState | None, donor: StateDonor | None = None) -> Node:
        if self.taking is None:
            self.taking = await self._start([])
        node = Node(await self._start(await self.taking.get_visible_maddrs()), held)
        await (donor or node.donor).add_p2p_handlers(node.p2p, namespace=RUN)
        self.nodes.append(node)
        return node

    async def _start(self, known: list[Any]) -> P2P:
        p2p = await P2P.create(initial_peers=known or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="server")
        self.stack.push_async_callback(p2p.shutdown)
        return p2p

    def records(self) -> list[PeerRecord]:
        return [node.record() for node in self.nodes] if self.signed is None else self.signed

    def taker(self, **more: Any) -> Taker:
        assert self.taking is not None
        more = {"timeout": 5.0, "buffer": StateBuffer.new(), **more}
        return Taker(ask_over(self.taking, RUN), Signatures(self.records), read_tree, **more)


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    async with AsyncExitStack() as stack:
        yield Network(stack)


def over_libp2p(test: Callable[[Network], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        async with network() as net:
            await asyncio.wait_for(test(net), 60)

    def wrapped() -> None:
        asyncio.run(run())

    wrapped.__name__ = test.__name__
    return wrapped


async def take(taker: Taker) -> Chunks:
    tree, indexes = await taker.take()
    return Chunks(tree, indexes, taker._buffer)


def assert_is(chunks: Chunks, expected: TrainingState) -> None:
    found = received_state(chunks._tree, chunks.whole(), "")
    assert (found.step, found.digest()) == (expected.step, expected.digest())


@over_libp2p
async def test_a_state_arrives_bit_for_bit(net: Network) -> None:
    node = await net.node(state())
    told: list[tuple[int, int]] = []
    taker = net.taker(on_bytes=lambda received, total: told.append((received, total)))
    chunks = await take(taker)
    assert_is(chunks, state())
    assert list(taker.donors) == [node.peer_id] and taker.refused == {}
    size = sum(t.nbytes for t in (*state().parameters.values(), *state().optimizer.values()))
    assert told[-1] == (size, size) and taker.received == node.sent == size
    assert all(total == size for _, total in told) and len(told) == len(state().tree())


@over_libp2p
async def test_only_what_differs_is_taken(net: Network) -> None:
    node = await net.node(state())
    mine = state()
    mine.parameters["weight"][CHUNK // 4 + 3] += 1
    mine.optimizer["v/bias"][7] += 1
    chunks = await take(net.taker(own=mine.tree()))
    assert [node.donor._snapshot.tree.name_of(i) for i in chunks] == ["weight[1]", "v/bias[0]"]  # type: ignore[union-attr]
    assert node.sent == CHUNK + 4 * 300
    for index, data in chunks.items():
        assert state().tree().holds(index, data)


@over_libp2p
async def test_who_only_draws_takes_the_parameters_alone(net: Network) -> None:
    node = await net.node(state())
    chunks = await take(net.taker(select=lambda tree: tree.parameter_chunks))
    found = received_state(chunks._tree, chunks.whole(), "", parameters_only=True)
    assert found.optimizer == {} and node.sent == sum(t.nbytes for t in found.parameters.values())
    assert all(torch.equal(found.parameters[name], tensor) for name, tensor in state().parameters.items())


@over_libp2p
async def test_an_equal_state_needs_no_chunk(net: Network) -> None:
    node = await net.node(state())
    assert len(await take(net.taker(own=state().tree()))) == node.sent == 0


def flip(manifest: bytes, buffer: StateBuffer) -> tuple[bytes, StateBuffer]:
    """One bit of weight[1], in the bytes alone."""
    offset, _ = read_tree(manifest).place(2)
    buffer.write(offset + 9, bytes([buffer.read(offset + 9, 1)[0] ^ 4]))
    return manifest, buffer


@over_libp2p
async def test_a_wrong_chunk_is_refused_at_once_and_named_and_another_donor_gives_it(net: Network) -> None:
    bad, good = await net.node(state()), await net.node(state())
    net.signed = [bad.record(), good.record(role="aux")]  # trainers are asked first
    bad.change = flip
    taker = net.taker()
    assert_is(await take(taker), state())
    assert list(taker.donors) == [bad.peer_id, good.peer_id]
    assert taker.refused == {bad.peer_id: "its chunk weight[1] is not what members signed"}
    sizes = [state().tree().place(i)[1] for i in range(2)]
    assert taker.received == sum(t.nbytes for t in (*state().parameters.values(), *state().optimizer.values()))
    assert good.sent == taker.received - sum(sizes)  # bias[0] and weight[0] had come


@over_libp2p
async def test_one_wrong_donor_alone_gives_no_state(net: Network) -> None:
    bad = await net.node(state())
    bad.change = flip
    with pytest.raises(NoState, match=rf"\({bad.peer_id}: its chunk weight\[1\] is not what members signed\)$"):
        await net.taker().take()


@over_libp2p
async def test_what_nobody_signed_is_not_taken_though_it_fits(net: Network) -> None:
    node = await net.node(state())
    net.signed = [node.record(digest="ab" * 32)]
    with pytest.raises(NoState, match="no member signed the state of step 5 that it offers"):
        await net.taker().take()
    assert node.sent == 0  # before any chunk


@over_libp2p
async def test_a_minority_at_its_step_is_not_believed(net: Network) -> None:
    liar = await net.node(state(seed=1))
    others = [record(name, epoch=5, digest=state().digest()) for name in ("anna", "ben")]
    net.signed = [liar.record(), *others]
    taker = net.taker()
    await taker._signatures.look()
    with pytest.raises(ValueError, match="no member signed"):
        await taker._take_from(liar.peer_id, settled=True)


@over_libp2p
async def test_a_donor_that_dies_on_the_way_and_another_that_goes_on(net: Network) -> None:
    dying, second = await net.node(state()), await net.node(state())
    net.signed = [dying.record(), second.record(role="aux")]

    def die(node: Node) -> None:
        if node.sent > CHUNK + 1200:  # two chunks are sent, the third is about to be
            node.on_sent = lambda _: None
            node.p2p._child.kill()

    dying.on_sent = die
    taker = net.taker()
    assert_is(await take(taker), state())
    assert taker.refused == {} and list(taker.donors)[-1] == second.peer_id
    first = taker.received - second.sent
    assert 0 <= first < taker.received and first in {0, 1200, CHUNK + 1200, 2 * CHUNK + 1200}


@over_libp2p
async def test_a_donor_that_steps_between_manifest_and_chunks_gives_what_it_offered(net: Network) -> None:
    node = await net.node(state())
    net.signed = [node.record()]
    taker = net.taker()
    await taker._signatures.look()
    aim = taker._aim_at

    async def step_meanwhile(tree: StateTree) -> None:
        node.state = state(6, seed=1)
        net.signed = [node.record()]
        await aim(tree)

    taker._aim_at = step_meanwhile  # type: ignore[method-assign]
    assert_is(await take(taker), state())
    assert node.calls == 1


@over_libp2p
async def test_who_asks_for_a_state_that_is_gone_takes_the_next_one(net: Network) -> None:
    node = await net.node(state(6, seed=1))
    net.signed = [record(node.peer_id, epoch=5, digest=state().digest())]
    taker = net.taker()
    taking = asyncio.create_task(take(taker))
    await asyncio.sleep(0.3)
    net.signed = [node.record()]
    assert_is(await taking, state(6, seed=1))


@over_libp2p
async def test_takers_share_one_copy_and_it_is_freed(net: Network) -> None:
    node = await net.node(state())
    results = await asyncio.gather(*(take(net.taker()) for _ in range(2)))
    for chunks in results:
        assert_is(chunks, state())
    assert node.calls == 1
    snapshot = node.donor._snapshot
    assert snapshot is not None and not snapshot.read_now()
    node.state = state(6, seed=1)
    assert_is(await take(net.taker()), state(6, seed=1))
    assert node.calls == 2 and snapshot._buffer.fileno() == -1  # freed before the next one was made


@over_libp2p
async def test_a_copy_lives_some_seconds_after_its_last_reader(net: Network) -> None:
    donor_room.LINGER_SECONDS = 0.4
    node = await net.node(state())
    await net.taker().take()
    snapshot = node.donor._snapshot
    assert snapshot is not None and snapshot._buffer.fileno() >= 0
    while node.donor._snapshot is not None:
        await asyncio.sleep(0.05)
    assert snapshot._buffer.fileno() == -1


@over_libp2p
async def test_without_a_state_or_a_donor(net: Network) -> None:
    empty = await net.node(None)
    for records in ([], [record(empty.peer_id, role="aux", epoch=0, digest="")]):
        net.signed = records
        with pytest.raises(NoState, match=f"none of {len(records)} peers can hand over a state") as error:
            await net.taker().take()
        assert not error.value.asked
    net.signed = [record(empty.peer_id, epoch=5, digest=state().digest())]
    with pytest.raises(NoState, match="it refuses: it has no state yet") as error:
        await net.taker().take()
    assert error.value.asked


class Answers(StateDonor):
    """A donor that answers with whatever it was given."""

    def __init__(self, *messages: bytes):
        super().__init__(None, None)  # type: ignore[arg-type]
        self.messages = messages

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        for message in self.messages:
            yield runtime_pb2.ExpertInfo(serialized_info=message)


Answers.__name__ = StateDonor.__name__  # the name under which libp2p knows the service
MANIFEST = state().tree().manifest()
LATER = StateTree.of(RUN, 5, {"other": torch.ones(3)}, {}).manifest()


NOT_TAKEN = [
    ([], "it did not answer"),
    ([b""], "cannot be read"),
    ([b"\xc1noise"], "cannot be read"),
    ([msgpack.packb([1, 2])], "cannot be read|another form"),
    ([msgpack.packb({"manifest": MANIFEST, "more": 1})], "another form"),
    ([msgpack.packb({"manifest": MANIFEST[:-1]})], "leaves"),
    ([msgpack.packb({"manifest": bytes(2**21 + 1)})], "another form"),
    ([msgpack.packb({"manifest": bytes(2**21 + 2**11)})], "another form"),
    ([msgpack.packb({"manifest": LATER})], "other tensors than this model's"),
    ([msgpack.packb({"chunk": 0, "data": b"x"})], "a chunk before the manifest"),
    ([msgpack.packb({"refused": "no\x1b[2J"})], r"it refuses: no \[2J"),
    ([msgpack.packb({"manifest": MANIFEST})], "left off with 6 of 6 chunks to go"),
    ([msgpack.packb({"manifest": MANIFEST}), msgpack.packb({"chunk": 1, "data": b""})], "something else"),
    ([msgpack.packb({"manifest": MANIFEST}), msgpack.packb({"chunk": 0, "data": b""})], r"bias\[0\] is not what"),
    ([msgpack.packb({"manifest": MANIFEST}), msgpack.packb({"manifest": MANIFEST})], "something else"),
]


@pytest.mark.parametrize("case", range(len(NOT_TAKEN)), ids=[words for _, words in NOT_TAKEN])
def test_no_answer_is_taken_on_trust(case: int) -> None:
    messages, words = NOT_TAKEN[case]

    @over_libp2p
    async def run(net: Network) -> None:
        await net.node(state(), Answers(*messages))
        with pytest.raises(NoState, match=words) as error:
            await net.taker().take()
        assert str(error.value).isprintable()

    run()


def test_more_chunks_than_were_asked_for_are_refused() -> None:
    tree, (_, buffer) = state().tree(), copy_of(state())
    chunks = [msgpack.packb({"chunk": i, "data": buffer.read(*tree.place(i))}) for i in range(len(tree))]

    @over_libp2p
    async def run(net: Network) -> None:
        await net.node(state(), Answers(msgpack.packb({"manifest": MANIFEST}), *chunks, chunks[0]))
        with pytest.raises(NoState, match="something else than the chunks that were asked for"):
            await net.taker().take()

    run()


@given(st.sets(st.integers(0, 3000)))
def test_a_request_is_what_was_asked_for(chunks: set[int]) -> None:
    digest, runs = request_in(request_of("ab" * 32, sorted(chunks)))
    assert digest == "ab" * 32
    assert [i for first, end in zip(runs[::2], runs[1::2], strict=True) for i in range(first, end)] == sorted(chunks)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner) | st.dictionaries(st.sampled_from(["digest", "chunks", "x"]), inner)


ANYTHING = st.recursive(st.none() | st.integers(-9, 2**33) | st.text() | st.binary(), nested)


@given(st.binary(max_size=200) | ANYTHING.map(msgpack.packb))
def test_any_other_request_is_refused(data: bytes) -> None:
    try:
        digest, runs = request_in(data)
    except Unavailable:
        return
    assert len(digest) <= 64 and runs == sorted(set(runs)) and len(runs) % 2 == 0


@given(st.binary(max_size=300))
def test_noise_is_no_answer(data: bytes) -> None:
    try:
        assert answer_in(data).keys() & {"manifest", "chunk", "refused"}
    except Refused:
        pass


def test_a_long_request_is_not_read() -> None:
    with pytest.raises(Unavailable):
        request_in(request_of("", range(0, 2**20, 2)))


def test_of_each_step_what_most_trainers_hold_is_remembered_though_they_step_on() -> None:
    records = [
        *(record(name, epoch=5, digest="aa") for name in "abc"),
        record("d", epoch=5, digest="bb"),
        *(record(name, epoch=6, digest="cc") for name in "ef"),
        *(record(name, epoch=6, digest="dd", role="aux") for name in "ghi"),
        record("j", epoch=4, digest="ee", role="aux"),
        record("k", epoch=7, digest="", role="aux"),
        record("me", epoch=9, digest="ff"),
        record("left", epoch=8, digest="ff", left=True),
    ]
    signatures = Signatures(lambda: records, own="me")
    asyncio.run(signatures.look())
    assert signatures._held == {(5, "aa"), (6, "cc"), (4, "ee")}
    assert signatures.donors(None) == ["e", "f"]
    tree = SimpleNamespace(step=5, digest="aa")
    assert signatures.donors(tree) == ["a", "b", "c", "e", "f"]
    records[:] = [record("a", epoch=6, digest="cc")]
    asyncio.run(signatures.look())
    assert (5, "aa") in signatures._held and signatures.donors(tree) == ["a", "b", "c"]


def test_what_a_donor_says_cannot_move_the_cursor() -> None:
    assert printable("no\x1b[2J\n\tstate\u202e yet") == "no [2J state yet"
    assert len(printable("x" * 10_000)) == 200

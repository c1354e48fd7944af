"""Takers of one state hand on to each other what has come of it, over libp2p and without."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from swarm.handing import LARGE, RUN, Network, Node, assert_is, copy_of, over_libp2p, read_tree, state, take
from swarm.made import record

from tt_cli.identity.rate_limit import Crowded
from tt_cli.swarm import wire
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.state import client as taker_room
from tt_cli.swarm.state import server as donor_room
from tt_cli.swarm.state import trusted_digests
from tt_cli.swarm.state.chunk_picker import ChunkPicker, Holdings
from tt_cli.swarm.state.client import ATTEMPTS, StateClient, WantedState, request_of, stream_to
from tt_cli.swarm.state.server import StateCopy, Unavailable
from tt_cli.swarm.state.trusted_digests import TrustedDigests

STATE = state(shapes=LARGE)
SIZE = sum(tensor.nbytes for tensor in (*STATE.parameters.values(), *STATE.optimizer.values()))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time between two questions than over the internet."""
    monkeypatch.setattr(taker_room, "NEWS_SECONDS", 0.02)
    monkeypatch.setattr(taker_room, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(taker_room, "HEDGE_SECONDS", taker_room.HEDGE_SECONDS)
    monkeypatch.setattr(taker_room, "RETRY_SECONDS", taker_room.RETRY_SECONDS)


async def first_of(net: Network, joiner: Node) -> tuple[StateClient, asyncio.Task[object]]:
    """A taker that has begun, and its task."""
    taker = net.taker(joiner)
    taking = asyncio.create_task(take(taker))
    while not taker.received:
        assert not taking.done() or taking.result()
        await asyncio.sleep(0.01)
    return taker, taking


@pytest.mark.slow
@over_libp2p
async def test_who_finds_no_place_takes_from_who_has_one(net: Network) -> None:
    donor, one, other = await net.node(STATE, max_upload=40e6), await net.node(None), await net.node(None)
    net.signed = [donor.record()]
    donor.donor._places = donor_room.Places(1, 1)
    _, taking = await first_of(net, one)
    second = net.taker(other)
    assert_is(await take(second), STATE)
    await taking
    assert set(second.donors) == {one.peer_id}, "no place was free at the donor"
    assert donor.sent == one.sent == SIZE and one.calls == 0, "from the memory where it lies"


@pytest.mark.slow
@over_libp2p
async def test_a_donor_need_give_each_chunk_about_once(net: Network) -> None:
    donor, *joiners = [await net.node(STATE, max_upload=40e6)] + [await net.node(None) for _ in range(4)]
    net.signed = [donor.record()]
    takers = [net.taker(joiner) for joiner in joiners]
    for chunks in await asyncio.gather(*map(take, takers)):
        assert_is(chunks, STATE)
    assert donor.sent < 2.5 * SIZE, "of four"
    assert sum(joiner.sent for joiner in joiners) > SIZE


@pytest.mark.slow
@over_libp2p
async def test_a_list_of_nobody_costs_refused_dials(net: Network) -> None:
    donor, joiner = await net.node(STATE, max_upload=40e6), await net.node(None)
    net.signed = [donor.record()]
    lists = [f"12D3KooWCTQa14yKHnPhWEyYpewf6ojbax3kVP3Ka73mPht4hn{end}" for end in ("ch", "ci")] + ["nobody"]
    donor.donor._keep(StateCopy(STATE.tree(), copy_of(STATE)[1]))
    donor.donor._snapshot._takers = dict.fromkeys(lists)  # type: ignore[union-attr]
    taker = net.taker(joiner)
    assert_is(await take(taker), STATE)
    assert list(taker.donors) == [donor.peer_id] and not taker.refused and not taker.problems
    taker._meet(f"nobody {number}" for number in range(1000))
    assert len(taker._others) == taker_room.MOST_KNOWN


@pytest.mark.slow
@over_libp2p
async def test_who_never_sends_what_it_says_to_hold_is_left_out(net: Network) -> None:
    async def never(count: int) -> bool:
        return False

    mute, good = await net.node(STATE), await net.node(STATE)
    mute.donor._give_way = never
    net.signed = [mute.record(), good.record(role="aux")]
    taker = net.taker(timeout=0.5, at_once=1)
    assert_is(await take(taker), STATE)
    assert taker.donors[mute.peer_id] == 0 and good.sent == SIZE


@pytest.mark.slow
@over_libp2p
async def test_who_sends_next_to_nothing_does_not_hold_up_one_that_takes_from_one_at_a_time(net: Network) -> None:
    async def drip(count: int) -> bool:
        return not slow.sent or await asyncio.sleep(60.0, True)

    slow, good = await net.node(STATE), await net.node(STATE)
    slow.donor._give_way = drip
    net.signed = [slow.record(), good.record(role="aux")]
    taker_room.HEDGE_SECONDS = taker_room.RETRY_SECONDS = 0.2
    taker = net.taker(timeout=60.0, at_once=1)
    async with asyncio.timeout(20.0):
        assert_is(await take(taker), STATE)
    assert 0 < taker.donors[slow.peer_id] == slow.sent < good.sent


@pytest.mark.slow
@over_libp2p
async def test_who_sends_chunks_in_another_order_than_they_were_asked_for_is_refused(net: Network) -> None:
    class Backwards(StateCopy):
        def promise(self, owed: deque[int], *asked: Any) -> None:
            super().promise(owed, *asked)
            owed.reverse()

    bad, good = await net.node(STATE), await net.node(STATE)
    bad.donor._keep(Backwards(STATE.tree(), copy_of(STATE)[1]))
    net.signed = [bad.record(), good.record(role="aux")]
    taker = net.taker(at_once=1)
    assert_is(await take(taker), STATE)
    assert taker.refused == {bad.peer_id: "it sent something else than the chunks that were asked for"}


@pytest.mark.slow
@over_libp2p
async def test_who_only_takes_is_named_to_nobody(net: Network) -> None:
    donor, joiner = await net.node(STATE), await net.node(None)
    net.signed = [donor.record()]
    async with stream_to(joiner.p2p, RUN, donor.peer_id) as first:
        await first.ask(request_of(STATE.digest(), []))
        for kind in ("manifest", "held"):
            assert (await first.answer() or "")[0] == kind
        assert donor.donor._snapshot is not None and donor.donor._snapshot.others("") == ()


@pytest.mark.slow
@over_libp2p
async def test_chunks_whose_turn_is_not_soon_are_left_out_of_the_answer(net: Network) -> None:
    donor, soon = await net.node(STATE), iter([True, False, True])
    donor.donor._give_way = lambda count: asyncio.sleep(0.0, next(soon))
    async with stream_to(net._taking, RUN, donor.peer_id) as stream:

        async def asked(*chunks: int) -> list[str | int]:
            await stream.ask(request_of(STATE.digest(), chunks))
            said = list[str | int]()
            while "held" not in said:
                answer = await stream.answer()
                assert answer is not None
                said.append(answer[1] if answer[0] == "chunk" else answer[0])
            return said

        assert await asked(0, 1) == ["manifest", 0, "held"]
        assert await asked(2) == [2, "held"]
        donor.donor._sending = donor_room.Places(0, 0)
        assert await asked(3) == ["held"], "chunks go out on so many streams already"


def held_by(answer: tuple[str, bytes, bytes, tuple[str, ...]], chunks: int) -> tuple[list[int], list[int]]:
    read = [np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:chunks] for bits in answer[1:3]]  # type: ignore[arg-type]
    return read[0].nonzero()[0].tolist(), read[1].nonzero()[0].tolist()


def on_loop(test: Callable[[], None]) -> Callable[[], None]:
    def wrapped() -> None:
        async def run() -> None:
            test()

        asyncio.run(run())

    wrapped.__name__ = test.__name__
    return wrapped


@on_loop
def test_a_copy_says_what_it_holds_and_what_it_gave() -> None:
    tree, (_, buffer) = state().tree(), copy_of(state())
    held = np.zeros(len(tree), bool)
    held[[1, 4]] = True
    copy = StateCopy(tree, buffer, held)
    with copy.read("ann", hands_on=True) as owed:
        copy._read_at = -math.inf
        copy.promise(owed, tree.digest, (1, 2, 4, 5))
        assert copy.under_way()
        copy._read_at = -math.inf
        assert held_by(("held", *copy.bits(), ()), len(tree)) == ([1, 4], [1, 4])
        assert tree.holds(1, copy.chunk(owed.popleft())) and copy.under_way()
        held[:] = False  # another state comes into this memory
        with pytest.raises(Unavailable, match="does not hold that chunk"):
            copy.chunk(4)
    assert held_by(("held", *copy.bits(), ()), len(tree)) == ([], [1]), "what was promised in vain was not given"
    for runs in ((0, 7), (6, 7)):
        with pytest.raises(Unavailable, match="no such chunk"):
            copy.promise(owed, tree.digest, runs)
    with pytest.raises(Unavailable, match="another state"):
        copy.promise(owed, "ab" * 32, ())


@on_loop
def test_takers_are_named_in_turns() -> None:
    copy = StateCopy(state().tree(), copy_of(state())[1])
    names = [f"taker {number}" for number in range(2 * wire.MOST_LISTED)]
    copy._takers = dict.fromkeys(names)
    first, second = copy.others("me"), copy.others("me")
    assert len(first) == len(second) == wire.MOST_LISTED and {*first, *second} == set(names)
    assert names[0] not in copy.others(names[0])
    with copy.read("ann", hands_on=True):
        assert "ann" in copy._takers
    assert "ann" not in copy._takers


@on_loop
def test_what_is_read_when_it_is_complete_stays_until_nobody_reads_it() -> None:
    for complete, read, stays in ((True, True, True), (True, False, False), (False, True, False)):
        tree, (_, buffer) = state().tree(), copy_of(state())
        server, copy = donor_room.StateServer(None, None, None, None), StateCopy(tree, buffer)  # type: ignore[arg-type]
        before = copy_of(state())[1]
        server._snapshot = StateCopy(tree, before)
        server.lend(copy)
        with copy.read("ann", hands_on=True) if read else contextlib.nullcontext():
            server.end_lending(complete)
            assert (server._snapshot is copy) == stays == (buffer.fileno() >= 0) == (before.fileno() < 0)
            assert server._lent is None


def test_what_was_taken_while_an_older_copy_was_made_stays_for_those_who_read_it() -> None:
    async def run() -> None:
        begun, copied = asyncio.Event(), asyncio.Event()

        async def make() -> tuple[bytes, StateBuffer]:
            begun.set()
            await copied.wait()
            return copy_of(state(3))

        server = donor_room.StateServer(make, read_tree, lambda count: None, None)  # type: ignore[arg-type]
        asked = asyncio.create_task(server._copy_for(state(3).digest()))
        await begun.wait()
        taken = StateCopy(state().tree(), copy_of(state())[1])
        server.lend(taken)
        with taken.read("ann", hands_on=True):
            server.end_lending(True)
            copied.set()
            assert await asked is taken and taken.tree.holds(1, taken.chunk(1))

    asyncio.run(run())


def test_who_asks_for_another_state_is_offered_the_one_that_is_read_while_it_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def make() -> tuple[bytes, StateBuffer]:
        return copy_of(state())

    async def ask() -> None:
        server = donor_room.StateServer(make, read_tree, lambda count: None, None)  # type: ignore[arg-type]
        copy = await server._copy_for(later)
        with copy.read("ann", hands_on=True):
            assert await server._copy_for(later) is copy
            monkeypatch.setattr(donor_room, "NEW_SECONDS", 0.0)
            with pytest.raises(Unavailable, match="older state"):
                await server._copy_for(later)
            assert await server._copy_for(copy.tree.digest) is copy
        assert await server._copy_for(later) is not copy, "nobody reads it any more"
        copy = await server._copy_for(later)
        with copy.read("who takes it for ever", hands_on=False):
            monkeypatch.setattr(donor_room, "TURN_SECONDS", 0.0)
            with pytest.raises(Unavailable, match="older state"):
                await server._copy_for(later)
            monkeypatch.setattr(donor_room, "TURN_BYTES", copy.tree.nbytes / 1e-9)
            assert await server._copy_for(copy.tree.digest) is copy
            assert await server._copy_for(later) is not copy, "it was its turn for long enough"

    later = "ab" * 32
    asyncio.run(ask())


def test_who_asks_for_made_up_states_has_no_copy_made_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make() -> tuple[bytes, StateBuffer]:
        return copy_of(state())

    async def ask() -> None:
        server, made_up = donor_room.StateServer(make, read_tree, lambda count: None, None), "ab" * 32  # type: ignore[arg-type]
        for _ in range(2):
            copy = await server._copy_for(made_up, "mallory")
        with pytest.raises(Crowded):
            await server._copy_for(made_up, "mallory")
        assert await server._copy_for(state().digest(), "mallory") is copy, "it is there"
        assert await server._copy_for(made_up, "ann") is not copy

    monkeypatch.setattr(donor_room, "COPIED_AT_ONCE", 2.0)
    asyncio.run(ask())


@pytest.mark.parametrize("holds", [True, False])
def test_who_only_takes_an_older_state_is_no_false_donor(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        async def ask(self, request: bytes) -> None: ...

        async def answer(self) -> wire.Answer:
            return "manifest", state(seed=1).tree().manifest()

    async def ask() -> None:
        foremost, older = state().digest(), state(3).digest()
        records = [record("donor", epoch=5, digest=foremost), record("taker", epoch=3, digest=older)]
        wanted = WantedState(read_tree, 1.0)
        client = StateClient(SimpleNamespace(peer_id="me"), RUN, TrustedDigests(lambda: records, "me"), None, wanted)  # type: ignore[arg-type]
        client._connect = lambda donor: contextlib.nullcontext(Older())  # type: ignore[assignment]
        await client._signatures.look()
        for _ in range(ATTEMPTS):
            await client._try("donor" if holds else "taker")
        assert {*client.refused} == ({"donor"} if holds else set())

    monkeypatch.setattr(trusted_digests, "SIGNATURE_PAUSES", (0.0,))
    asyncio.run(ask())


def test_what_the_fewest_have_is_asked_first() -> None:
    tree = state().tree()
    target, sources = ChunkPicker(tree, list(range(len(tree))), ()), [Holdings(len(tree)) for _ in range(3)]
    target.sources = dict(zip("abc", sources, strict=True))
    donor, one, other = sources
    donor.held[:] = True
    donor.given[[0, 1, 2]] = one.held[[0, 1]] = other.held[[1, 5]] = True

    def asked(source: Holdings, ahead: float) -> list[int]:
        source.requests.append(deque(target.next_for(source, ahead)))
        return list(source.requests[-1])

    assert asked(donor, 1) == [3]
    assert asked(donor, 2**30) == [0, 1, 2, 4, 5]
    assert asked(one, 2**30) == [1], "the one that is owed last, of those that it holds"
    assert asked(other, 2**30) == [5]
    other.requests.clear()
    target.received(5)
    target.give_back(target.sources.pop("a").owed)
    assert asked(one, 2**30) == [0] and asked(other, 2**30) == [], "it holds nothing else that is missing"

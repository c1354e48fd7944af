"""A state from several libp2p nodes to another: what arrives, what is refused, and who gives what is missing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from end_to_end.conftest import tiny_run
from swarm.handing import LARGE, RUN, Network, Node, assert_is, over_libp2p, read_tree, state, take
from swarm.made import record
from testbed.passes import Issuer

from tt_cli.checkpoint.hash_tree import CHUNK, StateTree
from tt_cli.checkpoint.training_state import received_state
from tt_cli.identity.passes import Pass, sign
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.state import client as taker_room
from tt_cli.swarm.state import server as donor_room
from tt_cli.swarm.state import trusted_digests as signatures_room
from tt_cli.swarm.state.client import DonorRefuses, DonorStream, NoState, request_of, stream_to
from tt_cli.swarm.state.server import StateCopy, StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests
from tt_cli.swarm.wire import Answer

pytestmark = pytest.mark.slow

PATIENCE = 60.0  # seconds that a taker waits for one donor at most


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time between two looks and two attempts than for people."""
    monkeypatch.setattr(signatures_room, "SIGNATURE_PAUSES", (0.02,) * 6)
    monkeypatch.setattr(taker_room, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(taker_room, "RESUME_SECONDS", 0.3)
    monkeypatch.setattr(taker_room, "HEDGE_SECONDS", 3.0)
    monkeypatch.setattr(donor_room, "LINGER_SECONDS", 5.0)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states, too, come from several donors."""
    monkeypatch.setattr(taker_room, "SHARE", 1)
    monkeypatch.setattr(taker_room, "LEAST_AHEAD", 2**-4)


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
    found = received_state(chunks.tree, chunks.whole(), "", parameters_only=True)
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
    bad, asked, taker = await net.node(state()), list[str](), net.taker()
    bad.change, connect = flip, taker._connect

    def asking(donor: str) -> Any:
        asked.append(donor)
        return connect(donor)

    taker._connect = asking  # type: ignore[assignment]
    with pytest.raises(NoState, match=rf"\({bad.peer_id}: its chunk weight\[1\] is not what members signed\)$"):
        await taker.take()
    assert asked == [bad.peer_id], "once, in all attempts"


@over_libp2p
async def test_what_nobody_signed_is_not_taken_though_it_fits(net: Network) -> None:
    node = await net.node(state())
    net.signed = [node.record(digest="ab" * 32)]
    with pytest.raises(NoState, match="it offers states that it does not sign itself") as none:
        await net.taker().take()
    assert node.sent == 0  # before any chunk
    assert none.value.refused == {node.peer_id}


@over_libp2p
async def test_a_minority_at_its_step_is_not_believed(net: Network) -> None:
    liar = await net.node(state(seed=1))
    others = [record(name, epoch=5, digest=state().digest()) for name in ("anna", "ben")]
    net.signed = [liar.record(), *others]
    taker = net.taker()
    await taker._signatures.look()
    for _ in range(taker_room.ATTEMPTS):
        with pytest.raises(ValueError, match="no member signed the state of step 5 that it offers"):
            await taker._take_from(liar.peer_id)


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
    await dying.p2p._child.wait()
    assert taker.refused == {} and list(taker.donors)[-1] == second.peer_id
    first = taker.received - second.sent
    assert 0 <= first < taker.received and first in {0, 1200, CHUNK + 1200, 2 * CHUNK + 1200}


@pytest.mark.usefixtures("several")
@over_libp2p
async def test_donors_that_hold_the_same_state_share_the_work(net: Network) -> None:
    large = state(shapes=LARGE)
    donors = [await net.node(large, max_upload=80e6) for _ in range(3)]
    taker = net.taker()
    assert_is(await take(taker), large)
    assert sum(taker.donors.values()) == taker.received
    assert all(0 < taker.donors[donor.peer_id] <= donor.sent and donor.calls == 1 for donor in donors)


@pytest.mark.usefixtures("several")
@over_libp2p
async def test_who_is_stopped_in_the_end_does_not_hold_up_the_others(net: Network) -> None:
    stopped, good = await net.node(state()), await net.node(state())

    def stop(node: Node) -> None:
        node.on_sent = lambda _: None
        node.p2p._child.send_signal(signal.SIGSTOP)

    stopped.on_sent = stop
    started = time.monotonic()
    taker = net.taker(timeout=PATIENCE)
    try:
        assert_is(await take(taker), state())
    finally:
        stopped.p2p._child.send_signal(signal.SIGCONT)
    assert time.monotonic() - started < PATIENCE and good.sent and taker.refused == {}


@over_libp2p
async def test_all_donors_give_the_state_that_most_hold(net: Network) -> None:
    ahead, *others = [await net.node(state(seed=seed)) for seed in (1, 0, 0)]
    net.signed = [node.record() for node in (ahead, *others)]
    taker = net.taker()
    assert_is(await take(taker), state())
    assert ahead.peer_id not in taker.donors and ahead.sent == 0


@over_libp2p
async def test_what_came_is_kept_over_a_break(net: Network) -> None:
    node = await net.node(state())
    broken: list[bool] = []

    def break_off(node: Node) -> None:
        if node.sent > CHUNK and not broken:
            broken.append(True)
            raise ConnectionResetError

    node.on_sent = break_off
    taker = net.taker()
    assert_is(await take(taker), state())
    assert broken and taker.received == sum(state().tree().place(i)[1] for i in range(6))


@over_libp2p
async def test_another_state_is_taken_where_nobody_has_the_one_any_more_that_was_begun(net: Network) -> None:
    node = await net.node(state())

    def go_on(node: Node) -> None:
        if node.sent > CHUNK and node.donor._snapshot is not None:
            node.on_sent, node.state = lambda _: None, state(6, seed=1)
            node.donor._snapshot.close()
            node.donor._snapshot = None

    node.on_sent = go_on
    lent = list[StateCopy]()
    assert_is(await take(net.taker(lend=lent.append)), state(6, seed=1))
    assert [copy.tree.step for copy in lent] == [5, 6] and not lent[0]._held.any(), "another state lies in its place"


@over_libp2p
async def test_a_donor_that_steps_between_manifest_and_chunks_gives_what_it_offered(net: Network) -> None:
    node = await net.node(state())
    net.signed = [node.record()]

    def step_meanwhile(manifest: bytes) -> StateTree:
        node.state = state(6, seed=1)
        net.signed = [node.record()]
        return read_tree(manifest)

    assert_is(await take(net.taker(read_tree=step_meanwhile)), state())
    assert node.calls == 1


@over_libp2p
async def test_who_asks_for_a_state_that_is_gone_takes_the_next_one(net: Network) -> None:
    node = await net.node(state(6, seed=1))
    net.signed = [record(node.peer_id, epoch=5, digest=state().digest())]

    def sign(*offered: Any) -> Any:
        net.signed = [node.record()]
        return offered

    node.change, taker = sign, net.taker()
    assert_is(await take(taker), state(6, seed=1))
    assert not taker.problems, "on the same stream"


@over_libp2p
async def test_takers_share_one_copy_and_it_is_freed(net: Network) -> None:
    node = await net.node(state())
    results = await asyncio.gather(*(take(net.taker()) for _ in range(2)))
    for chunks in results:
        assert_is(chunks, state())
    assert node.calls == 1
    snapshot = node.donor._snapshot
    assert snapshot is not None
    while snapshot.read_now():  # until it hears that the takers hung up
        await asyncio.sleep(0.01)
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
async def test_a_users_many_peers_leave_places_to_others(net: Network) -> None:
    issuer = Issuer()
    run = issuer.closed(tiny_run())
    node, membership = Node(net._taking, state()), Admission(run)
    giver = await net.node(state(), StateServer(node._offer, read_tree, node._count, membership))
    async with AsyncExitStack() as streams:
        opened = list[DonorStream]()

        async def peer_of(user: str) -> Callable[[], Awaitable[Answer | str | None]]:
            """Asks for the state on one more stream, and keeps that open."""
            one = await net.node(None)
            issued = Pass(user, one.peer_id, run.identity, time.time() - 1, time.time() + 600)
            membership.admit(sign(issued, issuer._key), one.peer_id)

            async def ask() -> Answer | str | None:
                stream = await streams.enter_async_context(stream_to(one.p2p, RUN, giver.peer_id))
                opened.append(stream)
                await stream.ask(request_of(state().digest(), []))
                try:
                    return await stream.answer()
                except ValueError as refusal:
                    return str(refusal)

            return ask

        first, second, other = [await peer_of(user) for user in ("ada", "Ada", "bob")]
        for ask in [first] * (donor_room.MAX_OF_ONE - 1) + [second]:
            assert (await ask() or "")[0] == "manifest"
        for ask in (first, second):
            # None: it hung up before it had read the request, and the words were lost
            assert await ask() in (None, "it refuses: it hands its state to as many as it can")
        assert (await other() or "")[0] == "manifest"
        assert membership.hear(issuer.ban([], run, ["ada"]))
        assert (await opened[0].answer() or "")[0] == "held"
        await opened[0].ask(request_of(state().digest(), [0]))
        with pytest.raises(DonorRefuses, match="user ada is banned"):
            await opened[0].answer()


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


def test_of_each_step_what_most_trainers_hold_is_remembered_though_they_step_on() -> None:
    records = [
        *(record(name, epoch=5, digest="aa") for name in "abc"),
        record("d", epoch=5, digest="bb"),
        *(record(name, epoch=6, digest="cc") for name in "ef"),
        *(record(name, epoch=6, digest="dd", role="aux") for name in "ghi"),
        record("j", epoch=4, digest="ee", role="aux"),
        record("calls only", epoch=5, digest="aa", client_mode=True),
        record("k", epoch=7, digest="", role="aux"),
        record("me", epoch=9, digest="ff"),
        record("left", epoch=8, digest="ff", left=True),
    ]
    signatures = TrustedDigests(lambda: records, own="me")
    asyncio.run(signatures.look())
    assert signatures._held == {(5, "aa"), (6, "cc"), (4, "ee")}
    assert {*signatures.donors(None)} == {"e", "f"}
    tree = SimpleNamespace(step=5, digest="aa")
    donors = signatures.donors(tree)
    assert {*donors[:3]} == {"a", "b", "c"} and {*donors[3:]} == {"e", "f"}
    records[:] = [record("a", epoch=6, digest="cc")]
    asyncio.run(signatures.look())
    donors = signatures.donors(tree)
    assert (5, "aa") in signatures._held and donors[0] == "a" and {*donors[1:]} == {"b", "c"}


def test_each_asks_donors_in_an_order_of_its_own_which_nobody_knows_beforehand() -> None:
    """Else four that send next to nothing, with the smallest ids, would be all that a newcomer asks at once."""
    records = [record(name, epoch=5, digest="aa") for name in "abcdefgh"]
    first = Counter[str]()
    for taker in range(160):
        signatures = TrustedDigests(lambda: records, own="me", secret=f"{taker}")
        for _ in range(2):
            asyncio.run(signatures.look())
        assert {*signatures.donors(None)} == {*"abcdefgh"}
        first[signatures.donors(None)[0]] += 1
    assert len(first) == 8 and max(first.values()) < 40
    one, other = (TrustedDigests(lambda: records, own="me") for _ in range(2))
    assert [*map(one.place_of, "abcdefgh")] != [*map(other.place_of, "abcdefgh")]


def test_votes_for_the_state_of_an_order_outvote_the_only_one_who_made_steps_since() -> None:
    absent = [record(name, vote=True) for name in "abc"]
    signatures = TrustedDigests(lambda: [record("defies it", epoch=6, digest="ff", vote=True)], "me", absent)
    asyncio.run(signatures.look())
    assert not signatures.believed(SimpleNamespace(step=6, digest="ff"))


MALLORY = record("mallory", epoch=6, digest="ff")


@pytest.mark.parametrize("later", [[], [MALLORY]], ids=["no answer", "voters gone"])
def test_what_one_alone_signed_is_not_believed_when_no_voter_is_seen_any_more(later: list[PeerRecord]) -> None:
    records = [*(record(name, vote=True) for name in "abcde"), MALLORY]
    signatures = TrustedDigests(lambda: records, own="me")
    asyncio.run(signatures.look())
    records[:] = later
    asyncio.run(signatures.look())
    assert signatures.believed(SimpleNamespace(step=5, digest="aa"))
    assert not signatures.believed(SimpleNamespace(step=6, digest="ff"))
    assert (signatures.view.digest == "aa") == (not later), "a look without an answer leaves all as it was"

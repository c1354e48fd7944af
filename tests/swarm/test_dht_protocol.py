"""Where a DHT's nodes are and whom they believe, between real nodes: what one of them answers hides no records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import pytest
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time
from testbed.attacks import neighbours as lies
from testbed.attacks.neighbours import Answer

from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.records import dht_protocol, dht_search
from tt_cli.swarm.records.dht_protocol import RoutingTable, node_id_of
from tt_cli.swarm.records.dht_search import NO_CACHES
from tt_cli.swarm.records.record_chain import Link

HERE = ["/ip4/127.0.0.1/tcp/0"]


class Nodes:
    """A DHT in this process. more: what its nodes are made with."""

    def __init__(self, stack: AsyncExitStack, more: dict[str, Any]):
        self.stack, self.more = stack, {**NO_CACHES, **more}
        self.nodes: list[DHTNode] = []
        self.first: list[str] = []

    async def start(self, initial: list[str] | None = None) -> DHTNode:
        """An honest node that joins through the first one."""
        joined = self.first if initial is None else initial
        node = await dht_search.DHTNode.create(initial_peers=joined, host_maddrs=HERE, wait_timeout=5.0, **self.more)
        self.stack.push_async_callback(node.shutdown)
        self.first = self.first or [str(address) for address in await node.get_visible_maddrs()]
        self.nodes.append(node)
        return node

    async def p2p(self) -> P2P:
        """A liar's, before it has a place."""
        p2p = await P2P.create(initial_peers=self.first, host_maddrs=HERE)
        self.stack.push_async_callback(p2p.shutdown)
        return p2p

    async def lie(self, p2p: P2P, place: DHTID, answer: Answer) -> lies.DHTProtocol:
        """Have a liar answer, and call at all of the others."""
        liar = await lies.DHTProtocol.lie(p2p, place, answer)
        for node in self.nodes:
            await liar.call_ping(node.peer_id)
        return liar

    async def hide(self) -> tuple[lies.DHTProtocol, str]:
        """A liar that keeps records like the others, and says that there is nothing new; and the key beside it."""
        p2p = await self.p2p()
        liar = await self.lie(p2p, node_id_of(p2p.peer_id), lambda key, caller: lies.named([]))
        return liar, key_beside(p2p, self.nodes)


@asynccontextmanager
async def started(number: int, **more: Any) -> AsyncIterator[Nodes]:
    hivemind_patches.apply()
    async with AsyncExitStack() as stack:
        nodes = Nodes(stack, more)
        for _ in range(number):
            await nodes.start()
        yield nodes


def key_beside(p2p: P2P, others: list[DHTNode]) -> str:
    """A key to which this one is nearer than the others, where ids follow from peer ids."""
    for number in count():
        key = DHTID.generate(source=(name := f"key {number}"))
        far = [key.xor_distance(node_id_of(node.peer_id)) for node in others]
        if key.xor_distance(node_id_of(p2p.peer_id)) < min(far):
            return name
    raise AssertionError


async def publish(nodes: list[DHTNode], key: str, value: str = "x") -> None:
    """A record of each."""
    until = get_dht_time() + 60.0
    assert all([await node.store(key, value, until, subkey=str(node.peer_id)) for node in nodes])


async def read(node: DHTNode, key: str) -> set[str]:
    """Whose records a node finds."""
    return set(await values(node, key, latest=True)) - {"theirs"}


async def values(node: DHTNode, key: str, latest: bool = False) -> dict[str, Any]:
    """Owner → record, as a look brings them. latest: see `DHTNode.get`."""
    found = await node.get(key, latest=latest)
    return {} if found is None else {subkey: record.value for subkey, record in found.value.items()}


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 60.0))


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen id", "own place"])
def test_a_node_beside_the_key_that_answers_as_it_likes_hides_no_record(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, of whom the earlier ones go on."""
    monkeypatch.setattr(dht_protocol, "HEARSAY_SECONDS", 0.5)  # for those that do not exist

    async def test() -> None:
        async with started(4, num_workers=1) as nodes:  # one after the other, the nearest first
            everybody = {str(node.peer_id) for node in nodes.nodes}
            for answer in (lies.anywhere, lies.in_their_places, lies.for_ever, lies.unsound):
                p2p = await nodes.p2p()
                key = key_beside(p2p, nodes.nodes)
                place = DHTID(int(DHTID.generate(source=key)) ^ 64) if chosen else node_id_of(p2p.peer_id)
                await nodes.lie(p2p, place, answer)
                await publish(nodes.nodes, key)
                for node in nodes.nodes:
                    assert await read(node, key) == everybody, answer
                    assert (p2p.peer_id in node.protocol.routing_table) != chosen, answer
                    (said,) = (await node.protocol.call_find(p2p.peer_id, [DHTID.generate(source=key)])).values()
                    assert said == (None, {}), answer

    run(test())


def test_nodes_are_where_their_peer_ids_say_and_nobody_else_counts() -> None:
    async def test() -> None:
        async with started(3) as nodes:
            one, *others = nodes.nodes
            for node in nodes.nodes:
                assert node.node_id == node.protocol.node_id == node_id_of(node.peer_id)
                known = set(node.protocol.routing_table.uid_to_peer_id)
                assert known == {other.node_id for other in nodes.nodes} - {node.node_id}
            p2p = await nodes.p2p()
            await nodes.lie(p2p, one.node_id, lies.anywhere)
            assert await others[0].protocol.call_ping(p2p.peer_id) is None
            assert others[0].protocol.routing_table[one.node_id] == one.peer_id
            assert p2p.peer_id not in others[0].protocol.routing_table

    run(test())


def test_of_those_for_whom_a_table_has_no_room_it_remembers_the_newest_and_those_it_joined_through() -> None:
    own, first, *others = (PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(2_000))
    table = RoutingTable(node_id_of(own), 2, 1)
    table.initial = (first,)
    for peer in [*others[:100], first, *others[100:]]:
        table.add_or_update_node(node_id_of(peer), peer)
        kept = [len(bucket.nodes_requested_for_ping) + len(bucket.replacement_nodes) for bucket in table.buckets]
        assert max(kept) <= 2 + 2 + 1 and peer in table
    assert first in table and len(table.uid_to_peer_id) == len(table.peer_id_to_uid) <= 4 * len(table.buckets) + 1


def test_nobody_is_remembered_for_whom_it_named() -> None:
    async def test() -> None:
        async with started(2) as nodes:
            one, other = nodes.nodes
            assert await one.protocol.call_find(other.peer_id, [one.node_id]) is not None
            assert not one.protocol._pings

    run(test())


def test_who_answered_and_has_lost_its_place_in_the_table_since_is_found_again() -> None:
    """Else twenty keys that call hide a node from searches for half a minute."""

    async def test() -> None:
        async with started(3) as nodes:
            one, other, third = nodes.nodes
            for _ in range(3):
                del one.protocol.routing_table[third.node_id]
                ((_, near),) = (await one.protocol.call_find(other.peer_id, [third.node_id])).values()
                assert near[third.node_id] == third.peer_id

    run(test())


def test_who_joins_through_a_node_out_of_its_place_is_told_that_nobody_answered() -> None:
    async def test() -> None:
        async with started(1) as nodes:
            p2p = await nodes.p2p()
            await nodes.lie(p2p, DHTID.generate(), lies.anywhere)
            with pytest.raises(RuntimeError, match="none of the initial_peers responded"):
                await nodes.start([str(address) for address in await p2p.get_visible_maddrs()])

    run(test())


@pytest.mark.parametrize(
    ("pong", "place", "reason"),
    [
        ((False, 0.0), b"", "can't access this node"),
        ((True, 60.0), b"", "local time must be within"),
        ((True, 0.0), b"\1" * 21, "DHTID must be in"),
    ],
    ids=["says that it cannot call back", "has another time", "says that it is nowhere"],
)
def test_of_several_initial_peers_one_that_answers_wrongly_keeps_nobody_out(
    pong: tuple[bool, float], place: bytes, reason: str
) -> None:
    async def test() -> None:
        async with started(1) as nodes:
            p2p = await nodes.p2p()
            liar = await nodes.lie(p2p, node_id_of(p2p.peer_id), lambda key, caller: lies.named([]))
            liar.pong, liar.node_info.node_id = pong, place or liar.node_info.node_id
            theirs = [str(address) for address in await p2p.get_visible_maddrs()]
            await publish(nodes.nodes, "key")
            newcomer = await nodes.start([*theirs, *nodes.first])
            assert await read(newcomer, "key") == {str(nodes.nodes[0].peer_id)}
            assert (await newcomer.protocol.call_ping(p2p.peer_id) is None) == bool(place)
            with pytest.raises(RuntimeError, match=f"none of the initial_peers .* {reason}"):
                await nodes.start(theirs)

    run(test())


def test_who_surrounds_a_key_hides_nobody_from_those_who_joined_through_the_same_node() -> None:
    """A record is kept at one node here, and a search asks one: the liar, which is nearest."""

    async def test() -> None:
        async with started(3, bucket_size=1, num_replicas=1) as nodes:
            p2p = await nodes.p2p()
            key = key_beside(p2p, nodes.nodes)
            await nodes.lie(p2p, node_id_of(p2p.peer_id), lambda key, caller: lies.named([]))
            await publish(nodes.nodes, key)
            for node in nodes.nodes:
                assert p2p.peer_id in node.protocol.routing_table
                assert await read(node, key) == {str(other.peer_id) for other in nodes.nodes}

    run(test())


def test_who_hides_what_is_new_hides_it_for_one_look_of_those_in_turn() -> None:
    async def test() -> None:
        async with started(4) as nodes:
            _, key = await nodes.hide()
            reader, *others = nodes.nodes
            await publish(nodes.nodes, key)
            assert await read(reader, key) == {str(node.peer_id) for node in nodes.nodes}
            for number in range(8):  # twice as many as are asked in turn
                await publish(others[:1], key, f"{number}")
                looks = [await values(reader, key), await values(reader, key)]
                assert f"{number}" in {look[str(others[0].peer_id)] for look in looks}

    run(test())


def test_where_a_node_has_lost_records_a_second_one_is_asked() -> None:
    async def test() -> None:
        async with started(4) as nodes:
            reader, lost, *others = nodes.nodes
            await publish(nodes.nodes, "key")
            await read(reader, "key")
            for number in range(6):
                await publish(others[:1], "key", f"{number}")
                lost.protocol.storage.clear()
                assert (await values(reader, "key"))[str(others[0].peer_id)] == f"{number}"

    run(test())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks wait for less."""
    monkeypatch.setattr(dht_search, "ONE_SECONDS", 0.3)
    monkeypatch.setattr(dht_search, "ALL_SECONDS", 0.3)


@pytest.mark.usefixtures("hurried")
def test_who_does_not_answer_holds_no_look_up() -> None:
    async def test() -> None:
        async with started(3) as nodes:
            liar, key = await nodes.hide()
            reader, *others = nodes.nodes
            await publish(nodes.nodes, key)
            await read(reader, key)
            liar.silent = True
            for latest in (False, False, False, True):
                await publish(others, key, str(latest))
                async with asyncio.timeout(4.0):  # less than a call waits
                    assert (await values(reader, key, latest))[str(others[0].peer_id)] == str(latest)

    run(test())


@pytest.mark.usefixtures("hurried")
def test_a_look_ends_in_time_though_nobody_answers() -> None:
    async def test() -> None:
        async with started(1) as nodes:
            liar, key = await nodes.hide()
            reader = nodes.nodes[0]
            await publish([reader], key)
            await read(reader, key)
            liar.silent = True
            for _ in range(3):
                async with asyncio.timeout(2.0):  # less than a call waits
                    assert str(reader.peer_id) in await values(reader, key)

    run(test())


def test_who_failed_is_asked_again_as_soon_as_it_is_no_longer_avoided() -> None:
    """Though a search that left it out would serve for two minutes, and it was in the routing table all the time."""

    async def test() -> None:
        async with started(4, blacklist_time=60.0) as nodes:
            reader, failed, *others = nodes.nodes
            await publish(nodes.nodes, "key")
            reader.blacklist.register_failure(failed.peer_id)
            await reader.protocol.update_routing_table(failed.node_id, failed.peer_id, responded=False)
            assert len(await read(reader, "key")) == 4, "from the others, who name it: it answers a ping"
            assert failed.peer_id in reader.protocol.routing_table and failed.peer_id in reader.blacklist
            reader.blacklist.register_success(failed.peer_id)
            await publish([failed], "key", "new")
            for node in (reader, *others):
                node.protocol.storage.clear()
            looks = [await values(reader, "key") for _ in range(2)]  # of three nodes each asks two, until one has it
            assert "new" in {look[str(failed.peer_id)] for look in looks}

    run(test())


class Marked(RecordValidatorBase):  # type: ignore[misc]
    """Lets values pass that are not "false"."""

    def validate(self, record: DHTRecord) -> bool:
        return MSGPackSerializer.loads(record.value) != "false"


class Nothing(RecordValidatorBase):  # type: ignore[misc]
    """Lets nothing pass."""

    def validate(self, record: DHTRecord) -> bool:
        return False


@pytest.mark.parametrize("owner", [b"\x91\x01", b"\xc1", b""], ids=["a list", "no message", "nothing"])
def test_of_what_a_node_answers_only_records_count(owner: bytes) -> None:
    async def test() -> None:
        async with started(2, record_validator=Marked()) as nodes:
            liar, key = await nodes.hide()
            until, packed = get_dht_time() + 60.0, MSGPackSerializer.dumps
            false = packed("mallory"), ((until, 0.0, packed("false")),)
            liar.records = False, (false, (packed("ann"), ((until, 0.0, packed("true")),)))
            assert await values(nodes.nodes[0], key, latest=True) == {"ann": "true"}
            liar.records = False, (false, (owner, ((until, 0.0, packed("true")),)))
            assert await values(nodes.nodes[0], key, latest=True) == {"ann": "true"}

    run(test())


def test_nothing_is_remembered_of_keys_that_others_ask_for() -> None:
    async def test() -> None:
        async with started(2, record_validator=Nothing()) as nodes:
            one, other = nodes.nodes
            until = get_dht_time() + 60.0
            chain = Link(until, 0.0, b"x"), Link(until + 1.0, until, b"y")
            for number in range(4):
                key = DHTID.generate(source=f"{number}")
                assert await other.protocol.call_renew(one.peer_id, key, "ann", chain) is False
                await other.protocol.call_records(one.peer_id, key)
            assert not one.protocol.read

    run(test())


def test_what_others_stored_is_not_passed_on_to_a_newcomer() -> None:
    async def test() -> None:
        async with started(1) as nodes:
            await publish(nodes.nodes, "key")
            newcomer = await nodes.start()
            assert await read(newcomer, "key") == {str(nodes.nodes[0].peer_id)}
            assert not len(newcomer.protocol.storage)

    run(test())

"""A DHT node that answers every search with what hides the records: invented neighbours, records that last for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from hivemind.dht import protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from tt_cli.swarm.wire import RECORDS_ANSWER

NAMED = 20  # neighbours in an answer
TRIED = 4096  # peer ids that are made up, of which those nearest to a key are named

Answer = Callable[[DHTID, PeerID], dht_pb2.FindResult]
"""(what is sought, who asks) → the answer."""


class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc] # calls go by this name
    """hivemind's own with the id that it was given. It keeps nothing, and says that it does."""

    _rpc_handlers = _stub_type = None  # not those of hivemind's class, where a stub of that was made before

    answer: Answer
    records: tuple[Any, ...] = (False, ())  # nothing is newer than what the caller has
    silent = False
    pong = False, 0.0  # what pings are told: whether it can call back, and by how many seconds its clock is ahead

    @classmethod
    async def lie(cls, p2p: P2P, node_id: DHTID, answer: Answer) -> DHTProtocol:
        """Serve such a node."""
        node: DHTProtocol = await cls.create(p2p, node_id, 20, 5, 5, 3.0)
        node.answer = answer
        return node

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """As it likes, to who asks to be called back."""
        if not request.validate:
            return await super().rpc_ping(request, context)
        available, ahead = self.pong
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time() + ahead, available=available)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """What it likes."""
        results = [self.answer(DHTID.from_bytes(key), context.remote_id) for key in request.keys]
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Yes."""
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

    async def rpc_records(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """What it likes, or nothing."""
        if self.silent:
            await asyncio.sleep(3600.0)
        return RECORDS_ANSWER.message(self.records)


def named(places: list[tuple[DHTID, PeerID]]) -> dht_pb2.FindResult:
    """Nothing found, and these neighbours."""
    return dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND,
        nearest_node_ids=[node.to_bytes() for node, _ in places],
        nearest_peer_ids=[peer.to_bytes() for _, peer in places],
    )


def invented_peer() -> PeerID:
    """A peer id as of an RSA key that nobody has."""
    return PeerID(b"\x12\x20" + os.urandom(32))


def anywhere(key: DHTID, caller: PeerID) -> dht_pb2.FindResult:
    """Invented neighbours in the places that are nearest."""
    return named([(DHTID(int(key) ^ number), invented_peer()) for number in range(4, 4 + NAMED)])


def in_their_places(key: DHTID, caller: PeerID) -> dht_pb2.FindResult:
    """Invented neighbours whose peer ids hash to near the key; and whoever asks."""
    peers = [invented_peer() for _ in range(TRIED)]
    places = [(DHTID.generate(source=peer.to_bytes()), peer) for peer in [*peers, caller]]
    nearest = sorted(places[:-1], key=lambda place: key.xor_distance(place[0]))
    return named([places[-1], *nearest[: NAMED - 1]])


def for_ever(key: DHTID, caller: PeerID) -> dht_pb2.FindResult:
    """One record, in a dictionary that says of itself that there will never be a later one."""
    records = DictionaryDHTValue()
    records.store("theirs", MSGPackSerializer.dumps("x"), get_dht_time() + 60.0)
    value = MSGPackSerializer.dumps(records)
    return dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=float("inf"))


def unsound(key: DHTID, caller: PeerID) -> dht_pb2.FindResult:
    """One record, in a dictionary whose bound is no number."""
    answer, records = for_ever(key, caller), DictionaryDHTValue()
    records.store("theirs", MSGPackSerializer.dumps("x"), get_dht_time() + 60.0)
    bound: Any = "many"
    records.maxsize, records.frozen = bound, True
    return dht_pb2.FindResult(type=answer.type, value=MSGPackSerializer.dumps(records), expiration_time=1e12)

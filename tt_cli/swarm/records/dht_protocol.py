"""A DHT whose nodes have no choice where they are, and believe nobody's word of who else is there.

hivemind's nodes choose their ids: one beside a key, which names invented neighbours to whoever searches, hides all that
lies under it. Here an id is a hash of the peer id, for which libp2p proves the key, and a neighbour that somebody names
is searched once it has answered a ping itself, for a peer id without a key costs nothing. Who makes many keys may still
surround one: so the nodes that this one joined through are asked too, and records are kept there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from hivemind.dht import protocol, routing
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer, get_logger

from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.records.record_chain import BrokenChain, Chain, ChainStorage, Link, Session, grown, opened
from tt_cli.swarm.wire import MOST_HELD, RECORDS_ANSWER, RECORDS_REQUEST, RENEWAL, RENEWED

logger = get_logger(__name__)

MOST_INITIAL = 2  # nodes that are asked first; hivemind keeps a record at five
HEARSAY_SECONDS, AGAIN_SECONDS = 2.0, 30.0  # that a search waits for who was named; until that one is pinged again
MOST_HEARSAY = 1024  # peers that were pinged because somebody named them
MOST_READ = 2**13  # records under one key that a reader remembers: more than one node keeps
# While a node joins: what was wrong with the answers of initial peers that cannot call it back, have another time, or
# are nowhere.
UNFIT: ContextVar[list[str]] = ContextVar("UNFIT")
HELD = struct.Struct(">8sI")  # tag of a record's owner, and the time until which the record lasts: see `stamp`


def node_id_of(peer: PeerID) -> DHTID:
    """The one place in the DHT of this peer."""
    return DHTID.generate(source=peer.to_bytes())


@lru_cache(maxsize=MOST_READ, typed=True)
def tag_of(subkey: Any) -> bytes:
    """By which a request names a record. 8 bytes."""
    return blake2b(MSGPackSerializer.dumps(subkey), digest_size=8).digest()


def stamp(until: float) -> int:
    """By which a request names a time: its milliseconds, of which 50 days fit into four bytes."""
    return round(1000.0 * until) % 2**32


def is_after(one: int, other: int) -> bool:
    """True where one such time is after another, of two that are less than 25 days apart."""
    return 0 < (one - other) % 2**32 < 2**31


class RoutingTable(routing.RoutingTable):
    """hivemind's, in which `initial`, the peers that this node joined through, are nearest to whatever it seeks."""

    initial: tuple[PeerID, ...] = ()

    def asked_first(self) -> list[PeerID]:
        """Those of them that answered last."""
        return list(itertools.islice((peer for peer in self.initial if peer in self), MOST_INITIAL))

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID) -> Any:
        """As hivemind does; of those for whom a bucket has no room it keeps `initial`, and as many as it holds."""
        to_ping = super().add_or_update_node(node_id, peer_id)
        bucket = self.buckets[self.get_bucket_index(node_id)]
        bucket.nodes_requested_for_ping.intersection_update(bucket.nodes_to_peer_id)
        spare = [node for node, peer in bucket.replacement_nodes.items() if peer not in self.initial]
        for oldest in spare[: -bucket.size]:
            del self[oldest]
        return to_ping

    def get_nearest_neighbors(self, query_id: DHTID, k: int, exclude: DHTID | None = None) -> Any:
        """The nearest nodes, nearest first. In a search of this node's own, which leaves it out, `asked_first` lead."""
        nearest = super().get_nearest_neighbors(query_id, k, exclude)
        first = self.asked_first() if exclude == self.node_id else []
        places = [(DHTID(query_id ^ (number + 2)), peer) for number, peer in enumerate(first)]  # ^ 1 is `beside` it
        return places + [(node, peer) for node, peer in nearest if peer not in first]


class DHTProtocol(protocol.DHTProtocol):
    """hivemind's, which checks who is where. Calls go by the name of this class: it has to be hivemind's.

    read: by key, the records that this node knows from others or stored with them, each until its end.
    session: signs what changes in those that it stores.
    """

    _rpc_handlers = _stub_type = None  # not those of hivemind's class, which hivemind would go on with

    @classmethod
    async def create(cls, p2p: P2P, node_id: DHTID, *args: Any, **more: Any) -> Any:
        """As hivemind does, whatever the id; records are kept as links."""
        protocol = await super().create(p2p, node_id_of(p2p.peer_id), *args, **more)
        protocol.storage = ChainStorage(protocol.remember)
        return protocol

    def __init__(self, **more: Any):
        super().__init__(**more)
        self.read: dict[DHTID, DictionaryDHTValue] = {}  # a look at a key makes no entry: others name any
        self.session = Session()
        self._pinged: dict[PeerID, float] = {}  # who was named by others, and when
        self._pings: dict[asyncio.Task[DHTID | None], PeerID] = {}  # that still run, and who named the pinged

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """As hivemind does, for nodes in their own places."""
        if not responded or node_id == node_id_of(peer_id):
            await super().update_routing_table(node_id, peer_id, responded=responded)

    async def call_ping(self, peer: PeerID, *args: Any, **more: Any) -> DHTID | None:
        """As hivemind does; a node that is not in its place has not answered, nor an initial peer that is `UNFIT`."""
        try:
            named = await super().call_ping(peer, *args, **more)
        except Exception as error:  # ValidationError, and what reading the answer raises
            if more.get("validate"):  # while it joins
                UNFIT.get().append(str(error))
            return None
        return named if named == node_id_of(peer) else None

    async def call_store(self, peer: PeerID, keys: Any, values: Any, expiration_time: Any, **more: Any) -> Any:
        """As hivemind does, for records of this peer's own: dictionaries are others', who store what is in them.

        Who joined through nobody keeps its own records too, for those who joined through it ask it for them.
        """
        if any(isinstance(value, DictionaryDHTValue) for value in values):
            return None
        for key, value, until, subkey in zip(keys, values, expiration_time, more["subkeys"], strict=True):
            with contextlib.suppress(BrokenChain):  # what is no record is for the others to refuse
                self.keep_own(key, subkey, self.checked(key, subkey, ((until, 0.0, value),)))
        return await super().call_store(peer, keys, values, expiration_time, **more)

    def keep_own(self, key: DHTID, subkey: Any, chain: Chain) -> bool:
        """Remember a record that this node sends; true where it is among the nodes that keep it."""
        self.remember(key, subkey, chain)
        here = not self.routing_table.initial or subkey in self.kept(key)
        return here and bool(self.storage.store_subkey(key, subkey, chain, chain[-1].until))

    def remember(self, key: DHTID, subkey: Any, chain: Chain) -> None:
        """A checked record, for readers at this node; where it is newer than what is known, and there is room."""
        known, until = self.read.setdefault(key, DictionaryDHTValue()), chain[-1].until
        if known.data[subkey].expiration_time < until if subkey in known else len(known) < MOST_READ:
            known.store(subkey, chain, until)

    def kept(self, key: DHTID) -> DictionaryDHTValue:
        """The records that this node keeps for others."""
        found = self.storage.get(key)
        return found.value if found and isinstance(found.value, DictionaryDHTValue) else DictionaryDHTValue()

    def known(self, key: DHTID) -> DictionaryDHTValue:
        """What this node has read, stored, or keeps."""
        return self.read.get(key, DictionaryDHTValue())

    def opened(self, key: DHTID, subkey: Any, chain: Chain) -> Any:
        """The fields of a record as they are now. Raises BrokenChain."""
        return opened(self._whole(key, subkey, chain[0]), chain)

    def _whole(self, key: DHTID, subkey: Any, link: Link) -> Any:
        """The fields of a whole record, without its signature."""
        value, record = link.data, (key.to_bytes(), MSGPackSerializer.dumps(subkey), link.data, link.until)
        if self.record_validator is not None:
            value = self.record_validator.strip_value(DHTRecord(*record))
        return MSGPackSerializer.loads(value)

    def with_pulse(self, key: DHTID, subkey: Any, record: dict[str, Any], until: float) -> Chain | None:
        """The record with what is new in it as one more link; None where all of it has to be stored."""
        if (known := self.known(key).get(subkey)) is None:
            return None
        if until < known.expiration_time:  # the clock was far ahead, and is set back: else others are told of that time
            del self.read[key][subkey], self.kept(key)[subkey]
            return None
        chain: Chain = known.value
        whole = self._whole(key, subkey, chain[0])
        pulse = self.session.pulse(key.to_bytes(), whole, chain, record, until)
        try:
            return pulse and grown(key.to_bytes(), whole, chain, pulse)
        except BrokenChain:  # of what is no record: all of it is for the others to refuse
            return None

    def checked(self, key: DHTID, subkey: Any, sent: Iterable[tuple[float, float, bytes]]) -> Chain:
        """The links that this node has read of a record, and these, all checked. Raises BrokenChain."""
        known = self.read.get(key, DictionaryDHTValue()).get(subkey)
        chain: Chain = known.value if known else ()
        for link in itertools.starmap(Link, sent):
            if not link.since:
                if not self._validate_record(key.to_bytes(), MSGPackSerializer.dumps(subkey), link.data, link.until):
                    raise BrokenChain("a record that is refused")
                chain = (link,)
            elif not chain:
                raise BrokenChain("a pulse on no record")
            else:
                chain = grown(key.to_bytes(), self._whole(key, subkey, chain[0]), chain, link)
        return chain

    async def rpc_renew(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """Keep what is new in a record of the caller's, or all of it."""
        key, owner, links = RENEWAL.read(request)
        place = DHTID.from_bytes(key)
        subkey = next((one for one, _ in self.known(place).items() if tag_of(one) == owner), None)
        try:
            if subkey is None:
                if links[0][1]:
                    raise BrokenChain("a pulse on no record")
                subkey = MSGPackSerializer.loads(owner)
            chain = self.checked(place, subkey, links)
        except BrokenChain:
            return RENEWED.message((False,))
        if self.authorizer is not None:
            size = sum(len(link.data) for link in chain)
            self.authorizer.check_record(self, key, subkey, size, chain[-1].until, str(context.remote_id))
        return RENEWED.message((self.storage.store_subkey(place, subkey, chain, chain[-1].until),))

    async def call_renew(self, peer: PeerID, key: DHTID, subkey: Any, chain: Chain) -> bool | None:
        """Send the last link of a record, and all of them where that peer lacks one; true if it keeps it.

        None without an answer. Who lacks one may have begun anew, and know nobody: so it is pinged.
        """
        try:
            async with self.rpc_semaphore:
                for owner, links in ((tag_of(subkey), chain[-1:]), (MSGPackSerializer.dumps(subkey), chain)):
                    request = RENEWAL.message((key.to_bytes(), owner, links))
                    answer = await self.get_stub(peer).rpc_renew(request, timeout=self.wait_timeout)
                    if RENEWED.read(answer)[0]:
                        return True
            await self.call_ping(peer)
            return False
        except Exception:  # whatever libp2p raises, and what is no answer
            logger.debug(f"{peer} took no renewal", exc_info=True)
            await self.update_routing_table(self.routing_table.get(peer_id=peer), peer, responded=False)
            return None

    async def rpc_records(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """Answer with the kept records that the caller lacks, and whether it has newer ones."""
        key, held = RECORDS_REQUEST.read(request)
        theirs, records = dict(HELD.iter_unpack(held)), []
        behind = set(theirs)
        for subkey, (chain, until) in self.kept(DHTID.from_bytes(key)).items():
            tag = tag_of(subkey)
            if (last := theirs.get(tag)) is None:
                records.append((MSGPackSerializer.dumps(subkey), chain))
            elif links := tuple(link for link in chain if is_after(stamp(link.until), last)):
                records.append((tag, links))
            if last is not None and not is_after(last, stamp(until)):
                behind.discard(tag)
        return RECORDS_ANSWER.message((bool(behind), tuple(records)))

    async def call_records(self, peer: PeerID, key: DHTID) -> bool | None:
        """Remember what a peer keeps and this node lacks. False where that peer is behind; None without an answer."""
        named = {
            tag_of(subkey): (subkey, record) for subkey, record in itertools.islice(self.known(key).items(), MOST_HELD)
        }
        held = b"".join(HELD.pack(tag, stamp(record.expiration_time)) for tag, (_, record) in named.items())
        try:
            async with self.rpc_semaphore:
                request = RECORDS_REQUEST.message((key.to_bytes(), held))
                answer = await self.get_stub(peer).rpc_records(request, timeout=self.wait_timeout)
            behind, records = RECORDS_ANSWER.read(answer)
            for owner, links in records:
                subkey = named[owner][0] if owner in named else MSGPackSerializer.loads(owner)
                with contextlib.suppress(BrokenChain):
                    self.remember(key, subkey, self.checked(key, subkey, links))
            return not behind
        except Exception:  # whatever libp2p raises, and what is no answer
            logger.debug(f"{peer} gave no records", exc_info=True)
            await self.update_routing_table(self.routing_table.get(peer_id=peer), peer, responded=False)
            return None

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        """As hivemind does, for neighbours that have answered this node. Records are read otherwise."""
        answer = await super().call_find(peer, keys)
        if answer is None:
            return None
        table, asked = self.routing_table, [*self.routing_table.asked_first(), self.p2p.peer_id]
        near = [place for _, places in answer.values() for place in itertools.islice(places.items(), self.bucket_size)]
        near = [(node, other) for node, other in near if node == node_id_of(other) and other not in asked]
        await self._meet(peer, list(dict.fromkeys(other for _, other in near if other not in table)))
        return {
            key: (None, dict(place for place in places.items() if place in near and place[1] in table))
            for key, (_, places) in answer.items()
        }

    async def _meet(self, namer: PeerID, named: Sequence[PeerID]) -> None:
        """Ping those whom this node does not know, and wait a little: who answers is in its table, now or later."""
        now, running = loop_time(), list(self._pings.values()).count(namer)
        due = [peer for peer in named if now > self._pinged.get(peer, -AGAIN_SECONDS) + AGAIN_SECONDS]
        pings = {peer: asyncio.create_task(self.call_ping(peer)) for peer in due[: self.bucket_size - running]}
        self._pinged |= dict.fromkeys(pings, now)
        self._pings |= dict.fromkeys(pings.values(), namer)
        for ping in pings.values():
            ping.add_done_callback(self._pings.pop)
        while len(self._pinged) > MOST_HEARSAY:
            del self._pinged[next(iter(self._pinged))]
        if pings:
            answered, _ = await asyncio.wait(pings.values(), timeout=HEARSAY_SECONDS)
            for peer in [peer for peer, ping in pings.items() if ping in answered and ping.result() is not None]:
                self._pinged.pop(peer, None)  # others may take its place in the table before it is named again

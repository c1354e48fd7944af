"""Look-ups in a DHT that keeps all of a swarm under one key, with no more traffic than they need.

hivemind's node asks for a key's value whenever it searches for the nodes nearest to that key, so each peer that renews
its record is told the records of all others, by every node that keeps them, and checks each signature; it keeps what it
read in caches, sends it on to a node that lacks it, and reads all of it again when one record changes. Here a search
for nodes brings nodes, and serves for a while; there are no caches; what was checked once is known. A reader names the
records that it has, and is sent what is newer: by each of the nodes that keep them, or by one after the other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack
from hivemind.dht import node as hivemind_node
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from tt_cli.identity.multiaddr import UNTRIED, dial
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.membership.rsa_identity import MAX_OWNER, owners_of, peer_id_of
from tt_cli.swarm.records.dht_protocol import UNFIT
from tt_cli.swarm.records.record_chain import NUMBERS, Chain

NO_CACHES = {"cache_locally": False, "cache_nearest": 0, "cache_on_store": False, "cache_refresh_before_expiry": 0}
MOST_KNOWN = 2**14  # records that passed, of some 200 bytes each here
SEARCH_SECONDS = 120.0  # that a search serves, if no node that keeps the records fails and no nearer one comes
ALL_SECONDS = 2.0  # that a look, or a renewal, waits for all whom it asks, if one has answered; in turn, if none has
ONE_SECONDS, ANSWERS = 1.0, 2  # after which a look in turn asks the next one; of nodes behind, with which it ends


class Checked(CompositeValidator):
    """All of these validators in one, which does not check again what has passed.

    That needs validators whose answer never changes for the same bytes: see validator.py.
    """

    priority = 10  # as that of hivemind's signatures: before whatever reads the record

    def __init__(self, validators: Iterable[RecordValidatorBase]):
        super().__init__(validators)
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """True for a record that all of them let pass, now or before."""
        digest = digest_of(record)
        if digest in self._passed:
            self._passed.move_to_end(digest)
            return True
        if not (is_bounded(record) and super().validate(record)):
            return False
        self._passed[digest] = None
        if len(self._passed) > MOST_KNOWN:
            self._passed.popitem(last=False)
        return True


def is_bounded(record: DHTRecord) -> bool:
    """True where it takes little time to find a record's owner and its signature, and to verify that."""
    try:
        fits = len(record.key) <= DHTID.HASH_NBYTES and len(record.subkey) <= MAX_OWNER
        return fits and record.value.count(b"[signature:") <= 1 and all(map(peer_id_of, owners_of(record.subkey)))
    except ValueError:
        return False


def digest_of(record: DHTRecord) -> bytes:
    """Of all that a signature covers, and of the signature. 16 bytes."""
    parts = record.key, record.subkey, record.value, record.expiration_time
    return blake2b(msgpack.packb(parts), digest_size=16).digest()


class Nearest(NamedTuple):
    """The outcome of a search: nodes, nearest first. known: those it could begin with. until: it serves."""

    nodes: dict[DHTID, PeerID]
    known: list[PeerID]
    until: float


class DHTNode(hivemind_node.DHTNode):
    """hivemind's, which reads what is new, and remembers where."""

    def __init__(self, **more: Any):
        super().__init__(**more)
        self._nearest: dict[DHTID, Nearest] = {}
        self._turn = 0

    @classmethod
    async def create(cls, *args: Any, initial_peers: Sequence[str] | None = None, **more: Any) -> DHTNode:
        """As hivemind does; those that it joined through are asked first: see `records/dht_protocol.py`.

        Raises RuntimeError where none of them answers as it should.
        """
        unfit = list[str]()
        UNFIT.set(unfit)
        found = initial_peers
        if initial_peers and more.get("p2p") is None:
            found = [address for address, trouble in (await dial(initial_peers)).items() if trouble in ("", UNTRIED)]
            if not found:
                raise RuntimeError("none of the initial peers answers")
        try:
            node: DHTNode = await super().create(*args, initial_peers=found, **more)
        except RuntimeError as error:
            raise RuntimeError(": ".join([str(error), *unfit[:1]])) from error
        peers = [PeerID.from_base58(address.rpartition("/p2p/")[2]) for address in initial_peers or ()]
        node.node_id, node.protocol.routing_table.initial = node.protocol.node_id, tuple(dict.fromkeys(peers))
        return node

    async def find_nearest_nodes(
        self, queries: Collection[DHTID], *args: Any, found_callback: Any = None, **more: Any
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """Search as hivemind's node does; for who stores, and so gives a callback, what was found before serves too."""
        if found_callback is None:
            keys = {beside(query): query for query in queries}
            nearest = await super().find_nearest_nodes(keys, *args, **more)
            return {keys[query]: nodes for query, nodes in nearest.items()}
        for query in queries:
            nodes, _ = await self._search(query)
            more["node_to_peer_id"].update(nodes)
            await found_callback(query, list(nodes), set())
        return {}

    async def _search(self, key: DHTID) -> tuple[dict[DHTID, PeerID], bool]:
        """The nodes nearest to a key, nearest first, and whether they were searched anew."""
        found = self._nearest.get(key)
        if found is not None and found.known == self._known(key) and loop_time() < found.until:
            return found.nodes, False
        nodes = (await self.find_nearest_nodes([key], exclude_self=True))[key]
        if nodes:  # else all that this node knows failed a moment ago
            self._nearest[key] = Nearest(nodes, self._known(key), loop_time() + SEARCH_SECONDS)
        return nodes, True

    def _known(self, key: DHTID) -> list[PeerID]:
        """The nearest of the routing table that a search would ask: not those that have just failed."""
        near = self.protocol.routing_table.get_nearest_neighbors(key, self.num_replicas, exclude=self.node_id)
        return [peer for _, peer in near if peer not in self.blacklist]

    async def get(self, key: Any, latest: bool = False, **more: Any) -> ValueWithExpiration[dict[Any, Any]] | None:
        """All records under a key as {subkey: record}, those that were read before too; None without any.

        latest: ask all nodes that keep them for what is newer, as after a search; else the one whose turn it is, and a
        second one if that is behind.
        """
        place = DHTID.generate(source=key)
        nodes, anew = await self._search(place)
        peers = list(dict.fromkeys(nodes.values()))
        if latest or anew:
            await self._ask_all(place, peers if anew else peers[: self.num_replicas])
        else:
            self._turn += 1
            first = self._turn % max(1, min(self.num_replicas, len(peers)))
            await self._ask_in_turn(place, peers[first : self.num_replicas] + peers[:first])
        known = self.protocol.known(place)
        records = {
            subkey: ValueWithExpiration(self.protocol.opened(place, subkey, chain), until)
            for subkey, (chain, until) in known.items()
        }
        return ValueWithExpiration(records, known.latest_expiration_time) if records else None

    async def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None, **more: Any) -> bool:
        """As hivemind does. Of a peer's record that the nodes have only what changed is sent: see record_chain.py."""
        place = DHTID.generate(source=key)
        if isinstance(value, dict) and value.keys() == NUMBERS.keys():
            value = {**value, "session": self.protocol.session.public}
            if (chain := self.protocol.with_pulse(place, subkey, value, expiration_time)) is not None:
                return await self._renew(place, subkey, chain)
        return bool(await super().store(key, value, expiration_time, subkey, **more))

    async def _renew(self, key: DHTID, subkey: Any, chain: Chain) -> bool:
        """Have as many of the nearest nodes keep a record as keep any; true if one does.

        Who takes its time is left to it once one has answered: a node that hangs must not hold up what all publish.
        """
        took = int(self.protocol.keep_own(key, subkey, chain))
        nodes, _ = await self._search(key)
        peers = list(dict.fromkeys(nodes.values()))
        while peers and took < self.num_replicas:
            asked, peers = peers[: self.num_replicas - took], peers[self.num_replicas - took :]
            calls = {asyncio.create_task(self._renew_at(peer, key, subkey, chain)) for peer in asked}
            answered, late = await asyncio.wait(calls, timeout=ALL_SECONDS)
            if late and not took + sum(call.result() for call in answered):
                answered, late = await asyncio.wait(calls)
            took += sum(call.result() for call in answered) + len(late)
        return took > 0

    async def _renew_at(self, peer: PeerID, key: DHTID, subkey: Any, chain: Chain) -> bool:
        return bool(self._heard(peer, await self.protocol.call_renew(peer, key, subkey, chain)))

    async def _ask(self, key: DHTID, peer: PeerID) -> bool | None:
        """As `DHTProtocol.call_records`; who does not answer is left out of searches for a while."""
        return self._heard(peer, await self.protocol.call_records(peer, key))

    def _heard(self, peer: PeerID, answer: bool | None) -> bool | None:
        (self.blacklist.register_failure if answer is None else self.blacklist.register_success)(peer)
        return answer

    async def _ask_all(self, key: DHTID, peers: Iterable[PeerID]) -> None:
        if asked := {asyncio.create_task(self._ask(key, peer)) for peer in peers}:
            answered, late = await asyncio.wait(asked, timeout=ALL_SECONDS)
            if late and all(task.result() is None for task in answered):
                await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)

    async def _ask_in_turn(self, key: DHTID, peers: Iterable[PeerID]) -> None:
        """Ask one after the other until one is not behind, or enough have answered.

        What comes later is known then: a peer whose line was down for a second must not wait for what that took.
        """
        asked, answers = set[asyncio.Task[bool | None]](), list[bool]()
        for peer in peers:
            asked.add(asyncio.create_task(self._ask(key, peer)))
            done, asked = await asyncio.wait(asked, timeout=ONE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            answers += [answer for task in done if (answer := task.result()) is not None]
            if any(answers) or len(answers) >= ANSWERS:
                return
        if asked and not answers:
            await asyncio.wait(asked, timeout=ALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)


def beside(key: DHTID) -> DHTID:
    """The id that differs from this one in its last bit: the same nodes are nearest there, and nothing lies."""
    return DHTID(int(key) ^ 1)

"""The limits of a DHT node: on requests and bytes of each peer, on keys in a request, and on the records that it keeps.

hivemind's own authorizer signs each request and each answer with RSA. That is not needed here: libp2p has proved who
calls and who is called, and both have shown their passes (pass_guard.py). A look into memory takes the place of two
signatures and two verifications, and there is nothing that could be replayed. Of the records that a node keeps only the
run's own count (validator.py), and each is taken from its owner alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from tt_cli.identity.rate_limit import Crowded, RateLimit
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.membership.rsa_identity import owners_of, peer_id_of
from tt_cli.swarm.shared_memory import shared_bytes

BYTES, BYTES_AT_ONCE = 2.0**21, 2.0**24  # to and from one peer: a second
MOST_KEYS = 4  # in one request: a search is for one, and so is a record
MAX_LIFE = 86400.0 + 600.0  # seconds of any record: the longest `statistics_expiration`, and some more
MOST_BYTES = 3 * 2**20  # of the records under one key: they travel in one answer, of which 4 MiB are read
SHARE = 2**11  # of each at least: an honest one has some 1,400, and 600 more with a pass
WORDS = 300  # of a refusal, in bytes


class DHTAuthorizer:
    """One for the DHT node of a peer. refusal: what this peer itself was told last when it was turned away.

    lives: for each key of the run, for how many seconds from now a record may stay.
    """

    admission_type, guard_type = Admission, PassGuard

    def __init__(self, membership: Admission, lives: Mapping[bytes, float] | None = None, clock: Clock | None = None):
        self._lives, self._clock = lives or {}, clock or Clock()
        self.passes = self.guard_type(membership, self._turned_away)
        self._bytes = RateLimit(BYTES_AT_ONCE, BYTES, clock=self._clock.monotonic)
        self._refusal = shared_bytes(WORDS)  # the host process reads it
        self._guarded: P2P | None = None

    @property
    def refusal(self) -> str:
        """For any process; "" when nobody turned this peer away."""
        return bytes(self._refusal).rstrip(b"\0").decode(errors="replace")

    def _turned_away(self, words: str) -> None:
        self._refusal[:] = words.encode()[:WORDS].ljust(WORDS, b"\0")

    def guard(self, p2p: P2P) -> None:
        """Have passes shown on all connections of the DHT's own node. For its process; again does nothing."""
        if p2p is not self._guarded:
            self._guarded = p2p
            self.passes.guard_calls(p2p)

    async def serve(
        self, node: DHTProtocol, method: Callable[..., Awaitable[Any]], request: Any, context: P2PContext
    ) -> Any:
        """Answer a member's request. Raises Crowded, whose words it is told, for more than it may ask."""
        caller = str(context.remote_id)
        self._bytes.charge(caller, request.ByteSize())
        if len(getattr(request, "keys", ())) > MOST_KEYS:
            raise Crowded("too many keys in one request")
        if isinstance(request, dht_pb2.StoreRequest):
            self._check_store(node, request, caller)
        answer = await method(request, context)
        self._bytes.charge(caller, answer.ByteSize())
        return answer

    def _check_store(self, node: DHTProtocol, request: dht_pb2.StoreRequest, caller: str) -> None:
        """Raises Crowded for more, or for longer, than this node should keep, NotAdmitted for what is not the caller's.

        So it does for hivemind's cache: a node answers with what lies there in the place of what it keeps.
        """
        for key, tag, value, time, cached in zip(
            request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache, strict=True
        ):
            if cached or tag == node.IS_DICTIONARY:
                raise NotAdmitted("records are taken from their owners, one by one")
            self.check_record(node, key, MSGPackSerializer.loads(tag), len(value), time, caller)

    def check_record(self, node: DHTProtocol, key: bytes, subkey: Any, size: int, until: float, caller: str) -> None:
        """Raises Crowded for a record that is too much, or lasts too long, NotAdmitted for one of another's.

        size: of what its owner signed, in bytes.
        """
        if not until <= self._clock.dht_time() + self._lives.get(key, MAX_LIFE):
            raise Crowded("a record that would stay for too long")
        self.check_owner(subkey, caller)
        found = node.storage.get(DHTID.from_bytes(key))
        kept = dict(found.value.items()) if found and isinstance(found.value, DictionaryDHTValue) else {}
        grown = _room(subkey, size) - (_room(subkey, _size(kept[subkey])) if subkey in kept else 0)
        if grown > 0 and sum(_room(one, _size(record)) for one, record in kept.items()) + grown > MOST_BYTES:
            raise Crowded("no room for another record")

    def check_owner(self, subkey: Any, caller: str) -> None:
        """Raises NotAdmitted where a subkey names an owner other than who calls. A notice has none."""
        if any(peer_id_of(owner) != caller for owner in owners_of(subkey)):
            raise NotAdmitted("another peer's record")


def _size(record: Any) -> int:
    return sum(len(link.data) for link in record.value)


def _room(subkey: Any, size: int) -> int:
    """Bytes that a record takes of its key's; no fewer than its share, up to which it may grow whenever it likes."""
    return max(SHARE, size + (len(subkey) if isinstance(subkey, bytes) else 0))

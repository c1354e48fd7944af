"""The limits of a DHT node: on requests and bytes of each peer, on keys in a request, and on the records that it keeps.

hivemind's own authorizer signs each request and each answer with RSA. That is not needed here: libp2p has proved who
calls and who is called, and both have shown their passes (pass_guard.py). A look into memory takes the place of two
signatures and two verifications, and there is nothing that could be replayed. Of the records that a node keeps only the
run's own count (validator.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from tt_cli.identity.rate_limit import Crowded, RateLimit
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.shared_memory import shared_bytes

BYTES, BYTES_AT_ONCE = 2.0**21, 2.0**24  # to and from one peer: a second
MOST_KEYS = 256  # in one request: whoever comes new is told all records that it should keep, in one
MAX_LIFE = 86400.0 + 600.0  # seconds: the longest `statistics_expiration`, and a record that is renewed as it was
MOST_RECORDS = 4096  # under one key
WORDS = 300  # of a refusal, in bytes


class DHTAuthorizer:
    """One for the DHT node of a peer. refusal: what this peer itself was told last when it was turned away."""

    admission_type, guard_type = Admission, PassGuard

    def __init__(self, membership: Admission):
        self.passes = self.guard_type(membership, self._turned_away)
        self._bytes = RateLimit(BYTES_AT_ONCE, BYTES)
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
            _check_room(node, request)
        answer = await method(request, context)
        self._bytes.charge(caller, answer.ByteSize())
        return answer


def _check_room(node: DHTProtocol, request: dht_pb2.StoreRequest) -> None:
    """Raises Crowded for what would make this node keep more, or for longer, than it should."""
    latest = get_dht_time() + MAX_LIFE
    for key, tag, time in zip(request.keys, request.subkeys, request.expiration_time, strict=True):
        if not time <= latest:
            raise Crowded("a record that would stay for too long")
        for storage in (node.storage, node.cache):
            found = storage.get(DHTID.from_bytes(key))
            kept = found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else ()
            if len(kept) < MOST_RECORDS:
                continue
            if tag == node.IS_DICTIONARY or MSGPackSerializer.loads(tag) not in kept:
                raise Crowded("no room for another record")

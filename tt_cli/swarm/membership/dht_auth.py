"""The door of the DHT: every request shows the pass of its sender, every answer that of the one who answers.

hivemind's own authorizer signs each request and each answer with RSA. That is not needed here: libp2p has proved who
calls (`context.remote_id`) and who is called, a pass names the peer that it was issued to, and the messages carry it in
the fields that hivemind has for a token. A look into memory takes the place of two signatures and two verifications,
and there is nothing that could be replayed.

In open runs there are no passes, but the same limits: on requests and bytes of each peer, on keys in a request, and on
the records that this node keeps, of which only the run's own count (validator.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time, get_logger
from hivemind.utils.auth import AuthorizerBase

from tt_cli.identity.rate_limit import Crowded, RateLimit
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.shared_memory import shared_bytes

logger = get_logger(__name__)

REQUESTS, REQUESTS_AT_ONCE = 60.0, 600.0  # of one peer: a second
BYTES, BYTES_AT_ONCE = 2.0**21, 2.0**24  # to and from one peer: a second
MOST_KEYS = 256  # in one request: whoever comes new is told all records that it should keep, in one
MAX_LIFE = 86400.0 + 600.0  # seconds: the longest `statistics_expiration`, and a record that is renewed as it was
MOST_RECORDS = 4096  # under one key
WORDS = 300  # of a refusal, in bytes
REFUSED = "not admitted: "


class DHTAuthorizer(AuthorizerBase):
    """One for the DHT node of a peer. refusal: what this peer itself was told last when it was turned away."""

    def __init__(self, membership: Admission):
        self._membership = membership
        self._requests = RateLimit(REQUESTS_AT_ONCE, REQUESTS)
        self._bytes = RateLimit(BYTES_AT_ONCE, BYTES)
        self._refusal = shared_bytes(WORDS)  # the host process reads it

    @property
    def refusal(self) -> str:
        """For any process; "" when nobody turned this peer away."""
        return bytes(self._refusal).rstrip(b"\0").decode(errors="replace")

    async def serve(
        self, node: DHTProtocol, method: Callable[..., Awaitable[Any]], request: Any, context: P2PContext
    ) -> Any:
        """Answer a peer's request, if it may ask. Raises NotAdmitted or Crowded, whose words it is told."""
        caller = str(context.remote_id)
        try:
            self._requests.charge(caller)
            self._membership.admit(_text(request.auth.client_access_token.signature), caller)
            self._bytes.charge(caller, request.ByteSize())
        except NotAdmitted as error:
            raise NotAdmitted(f"{REFUSED}{error}") from None
        if len(getattr(request, "keys", ())) > MOST_KEYS:
            raise Crowded("too many keys in one request")
        if isinstance(request, dht_pb2.StoreRequest):
            _check_room(node, request)
        answer = await method(request, context)
        answer.auth.service_access_token.signature = self._membership.mine().encode()
        self._bytes.charge(caller, answer.ByteSize())
        return answer

    async def call(self, method: Callable[..., Awaitable[Any]], request: Any, peer_id: str, **more: Any) -> Any:
        """Ask another peer. Raises NotAdmitted when it is no member, and whatever the connection raises."""
        if self._membership.is_banned(peer_id):
            raise NotAdmitted("it is banned")
        request.auth.client_access_token.signature = self._membership.mine().encode()
        try:
            answer = await method(request, **more)
        except P2PHandlerError as error:
            if REFUSED in str(error):
                words = str(error).split(REFUSED, 1)[1].rstrip("')\" ").encode()[:WORDS]
                self._refusal[:] = words.ljust(WORDS, b"\0")
            raise
        self._membership.admit(_text(answer.auth.service_access_token.signature), peer_id)
        return answer

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """hivemind's own hooks are not used: see `hivemind_patches.authorize_by_peer_id`."""
        raise NotImplementedError

    validate_request = sign_response = validate_response = sign_request


def _text(signature: bytes) -> str:
    return signature.decode("ascii", errors="replace")


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

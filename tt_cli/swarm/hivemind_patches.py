"""Every change to hivemind at run time: one function and one reason each.

They count in this process and in those forked from it. `apply` makes all that a DHT node and an averager need, before
either starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import hivemind.dht.dht
import hivemind.dht.protocol
from google.protobuf.message import Message  # type: ignore[import-untyped] # protobuf ships no types
from hivemind.averaging.control import StepControl
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MPFuture
from hivemind.utils.auth import AuthorizerBase, AuthRole, AuthRPCWrapper

from tt_cli.swarm.membership.dht_auth import DHTAuthorizer

MAX_ANSWER = 2**22  # bytes of one message; a chunk of a state with its manifest's limit is half of that
PIECE, PIECE_SECONDS = 2**15, 60.0  # the slowest pace of a stream; many may share a slow line

Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]


def apply() -> None:
    """Make all changes that a DHT node and an averager need."""
    cancel_before_telling()
    authorize_by_peer_id()
    search_beside_the_key()
    bound_messages()


def cancel_before_telling() -> None:
    """Have a step control count as cancelled before its averager hears of it.

    The averager looks whether it is when it hears of it. Told first, it went on, and made a round that its trainer had
    given up, and repeated in another group, while the other members stepped.
    """
    StepControl.cancel = _cancel


def authorize_by_peer_id() -> None:
    """Tell the DHT's authorizer which peer calls, and have passes shown on the node's connections.

    hivemind's wrapper does not say who calls, and expects a signature of each message instead.
    """
    hivemind.dht.protocol.AuthRPCWrapper = _AuthWrapper


def search_beside_the_key() -> None:
    """Have a search for the nodes nearest to a key bring nodes alone.

    hivemind asks them for the key's value too: each peer that renewed its record was told the records of all others.
    """
    hivemind.dht.dht.DHTNode = _SearchNode


def bound_messages() -> None:
    """Give messages a largest size and a slowest pace: see `network/stream_limits.py`.

    hivemind reads as many bytes as a message's header says, for as long as that takes.
    """
    P2P.receive_protobuf = staticmethod(_receive_protobuf)
    P2P.send_raw_data = staticmethod(_send_raw_data)


_told_first = StepControl.cancel


def _cancel(control: StepControl) -> bool:
    MPFuture.cancel(control)
    return bool(_told_first(control))


class _AuthWrapper(AuthRPCWrapper):
    """hivemind's wrapper of a node's methods, and the peer that calls for the authorizer."""

    def __init__(self, stub: Any, role: AuthRole, authorizer: AuthorizerBase | None, **more: Any):
        super().__init__(stub, role, authorizer, **more)
        if isinstance(authorizer, DHTAuthorizer):
            authorizer.guard(stub.p2p if role == AuthRole.SERVICER else stub._p2p)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("rpc_"):
            return object.__getattribute__(self, name)
        authorizer = self._authorizer
        if not isinstance(authorizer, DHTAuthorizer):
            return super().__getattribute__(name)
        method, node = getattr(self._stub, name), self._stub
        if self._role == AuthRole.CLIENT:
            return method

        async def served(request: Any, context: P2PContext) -> Any:
            return await authorizer.serve(node, method, request, context)

        return served


class _SearchNode(DHTNode):
    """hivemind's node, whose searches ask beside the key: the same nodes are nearest there, and nothing lies."""

    async def find_nearest_nodes(
        self, queries: Collection[DHTID], *args: Any, found_callback: Found | None = None, **more: Any
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """Search as hivemind's node does."""
        meant = {beside(query): query for query in queries}

        async def found(query: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            assert found_callback is not None
            await found_callback(meant[query], nearest, visited)

        told = found if found_callback is not None else None
        nearest = await super().find_nearest_nodes(meant, *args, found_callback=told, **more)
        return {meant[query]: nodes for query, nodes in nearest.items()}


def beside(key: DHTID) -> DHTID:
    """The id that differs from this one in its last bit."""
    return DHTID(int(key) ^ 1)


async def _receive_protobuf(kind: type[Message], reader: Any) -> tuple[Message | None, RPCError | None]:
    """Receive a message as hivemind does.

    Raises IncompleteReadError, as for a connection that broke, for what is too large or too slow.
    """
    try:
        async with asyncio.timeout(getattr(reader, "patience", None)):
            marker = await reader.readexactly(1)
        if marker not in (P2P.MESSAGE_MARKER, P2P.ERROR_MARKER):
            raise TypeError("Invalid Protobuf message type")
        async with asyncio.timeout(PIECE_SECONDS):
            size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
        if size > getattr(reader, "largest", MAX_ANSWER):
            raise asyncio.IncompleteReadError(b"", size)
        async with asyncio.timeout(PIECE_SECONDS * (1 + size / PIECE)):
            data = await reader.readexactly(size)
    except TimeoutError:
        raise asyncio.IncompleteReadError(b"", None) from None
    if marker == P2P.ERROR_MARKER:
        reader.patience = None  # the other side has said all, and takes the answers
        return None, RPCError.FromString(data)
    return kind.FromString(data), None


async def _send_raw_data(data: bytes, writer: Any, *, chunk_size: int = PIECE) -> None:
    """Send bytes as hivemind does. Raises ConnectionError when the other side takes too little of it."""
    writer.write(len(data).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    view = memoryview(data)
    try:
        for offset in range(0, max(1, len(view)), chunk_size):
            writer.write(view[offset : offset + chunk_size])
            async with asyncio.timeout(PIECE_SECONDS):
                await writer.drain()
    except TimeoutError:
        raise ConnectionError("the other side takes nothing") from None

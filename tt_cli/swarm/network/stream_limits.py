"""What a stranger may do with a libp2p stream: send little, in time, and few at once.

hivemind reads as many bytes as a message's header says, for as long as that takes, on as many streams as anybody opens.
Here a message has a largest size, which each request sets for itself, and both ends a slowest pace: who sends a request
drop by drop, or takes an answer so, is hung up on. To hivemind that looks like a connection that broke. So is who goes
on sending after the answer: hivemind would wait for ever for somebody to read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from google.protobuf.message import Message  # type: ignore[import-untyped] # protobuf ships no types
from hivemind.p2p import P2P
from hivemind.proto.p2pd_pb2 import RPCError

from tt_cli.identity.rate_limit import Crowded, Places
from tt_cli.swarm.membership.admission import Admission

MAX_ANSWER = 2**22  # bytes of one message; a chunk of a state with its manifest's limit is half of that
MAX_REQUEST = 2**20 + 2**12  # of one message of a stream that others open; a part is half of that
SMALLER = {
    "rpc_join_group": 2**13,
    "rpc_fetch_average": 2**16,
    "rpc_download_state": 2**10,
    "rpc_audit": 2**10,
}  # one request, not many
REQUEST_SECONDS = 30.0  # for one of those
PIECE, PIECE_SECONDS = 2**15, 60.0  # the slowest pace of a stream; many may share a slow line
EACH, TOTAL = 12, 512  # streams of one peer at once, and of all
LINGER_SECONDS = 5.0  # for the end of a stream that was answered

_answered: ContextVar[asyncio.Event] = ContextVar("_answered")


def guard(p2p: P2P, membership: Admission) -> None:
    """Guard all streams that others open to this node from now on."""
    places, add_handler = Places(EACH, TOTAL), p2p.add_binary_stream_handler
    add_stream_handler = p2p._add_protobuf_stream_handler

    async def add_binary_stream_handler(
        name: str, handler: Callable[[Any, Any, Any], Awaitable[None]], **more: Any
    ) -> None:
        method = name.rpartition(".")[2]

        async def guarded(info: Any, reader: Any, writer: Any) -> None:
            caller = str(info.peer_id)
            try:
                if membership.is_banned(caller):
                    raise Crowded("banned")
                with places.one(caller):
                    reader.largest = SMALLER.get(method, MAX_REQUEST)
                    reader.patience = REQUEST_SECONDS if method in SMALLER else None
                    await _until_answered(handler(info, reader, writer))
            except Crowded:
                writer.close()

        await add_handler(name, guarded, **more)

    async def add_protobuf_stream_handler(
        name: str, handler: Callable[[Any, Any], Any], *args: Any, **more: Any
    ) -> None:
        async def telling(requests: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in handler(requests, context):
                    yield response
            finally:
                _answered.get().set()

        await add_stream_handler(name, telling, *args, **more)

    p2p.add_binary_stream_handler = add_binary_stream_handler
    p2p._add_protobuf_stream_handler = add_protobuf_stream_handler


async def _until_answered(handling: Any) -> None:
    """Await the handling of one stream; LINGER_SECONDS after its answer it is ended."""
    answered = asyncio.Event()
    _answered.set(answered)
    handler, answer = asyncio.create_task(handling), asyncio.create_task(answered.wait())
    try:
        await asyncio.wait({handler, answer}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({handler}, timeout=LINGER_SECONDS)
    finally:
        answer.cancel()
        handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await handler


def install() -> None:
    """Have hivemind read and write its messages within these bounds, here and in forked processes."""
    P2P.receive_protobuf = staticmethod(receive_protobuf)
    P2P.send_raw_data = staticmethod(send_raw_data)


async def receive_protobuf(kind: type[Message], reader: Any) -> tuple[Message | None, RPCError | None]:
    """As hivemind's. Raises IncompleteReadError, as for a connection that broke, for what is too large or too slow."""
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


async def send_raw_data(data: bytes, writer: Any, *, chunk_size: int = PIECE) -> None:
    """As hivemind's. Raises ConnectionError when the other side takes too little of it."""
    writer.write(len(data).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    view = memoryview(data)
    try:
        for offset in range(0, max(1, len(view)), chunk_size):
            writer.write(view[offset : offset + chunk_size])
            async with asyncio.timeout(PIECE_SECONDS):
                await writer.drain()
    except TimeoutError:
        raise ConnectionError("the other side takes nothing") from None

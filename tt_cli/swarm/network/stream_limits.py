"""The bounds of a libp2p stream that another peer opens: it shows a pass first, sends little, in time, and few at once.

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

from hivemind.p2p import P2P
from hivemind.proto.p2pd_pb2 import RPCError

from tt_cli.identity.rate_limit import Crowded, Places
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.membership.pass_guard import PassGuard

MAX_REQUEST = 2**20 + 2**12  # of one message of a stream that others open; a part is half of that
SMALLER = {
    "rpc_join_group": MAX_REQUEST,  # who is locked shows a vote, a kilobyte, of each member
    "rpc_fetch_average": 2**16,
    "rpc_download_state": 2**10,
    "rpc_audit": 2**10,
}  # one request, not many
REQUEST_SECONDS = 30.0  # for one of those
EACH, TOTAL = 12, 512  # streams of one peer at once, and of all
OF_MEMBERS, OF_ONE = ("rpc_join_group", "rpc_aggregate_part"), 4  # a member needs one of each, the others are ending
LINGER_SECONDS = 5.0  # for the end of a stream that was answered
REFUSED_SECONDS = 1.0  # for the other side to hang up: closed with something unread, a stream is reset, its words lost

_answered: ContextVar[asyncio.Event] = ContextVar("_answered")


def guard(p2p: P2P, membership: Admission, members: int) -> None:
    """Guard all streams that others open to this node from now on, and have passes shown on all its connections.

    members: of a group, at most.
    """
    passes = PassGuard(membership)
    passes.guard_calls(p2p)
    of_members, others = {name: Places(OF_ONE, 2 * members) for name in OF_MEMBERS}, Places(EACH, TOTAL)
    add_handler = p2p.add_binary_stream_handler
    add_stream_handler = p2p._add_protobuf_stream_handler

    async def add_binary_stream_handler(
        name: str, handler: Callable[[Any, Any, Any], Awaitable[None]], **more: Any
    ) -> None:
        method = name.rpartition(".")[2]
        places = of_members.get(method, others)

        async def guarded(info: Any, reader: Any, writer: Any) -> None:
            try:
                with places.one(str(info.peer_id)):
                    async with asyncio.timeout(REQUEST_SECONDS):
                        await passes.admit_stream(reader, info.peer_id)
                    reader.largest = SMALLER.get(method, MAX_REQUEST)
                    reader.patience = REQUEST_SECONDS if method in SMALLER else None
                    await _until_answered(handler(info, reader, writer))
            except (NotAdmitted, Crowded) as error:
                with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                    await P2P.send_protobuf(RPCError(message=str(error)), writer)
                    await asyncio.wait_for(reader.readexactly(MAX_REQUEST), REFUSED_SECONDS)
                writer.close()
            except (TimeoutError, asyncio.IncompleteReadError):  # no frame came
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

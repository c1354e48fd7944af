"""Every change to hivemind at run time: one function and one reason each.

They count in this process and in those forked from it. `apply` makes all that a DHT node and an averager need, before
either starts and before anything is encoded; again it changes nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any
from uuid import UUID

import hivemind.dht.dht
import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.p2p.p2p_daemon_bindings.p2pclient as p2p_client
import hivemind.utils.tensor_descr
import torch
from google.protobuf.message import Message  # type: ignore[import-untyped] # protobuf ships no types
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MPFuture
from hivemind.utils.auth import AuthRole
from hivemind.utils.timed_storage import TimedStorage

from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.records.dht_protocol import DHTProtocol, RoutingTable
from tt_cli.swarm.records.dht_search import DHTNode

MAX_ANSWER = 2**22  # bytes of one message; a chunk of a state with its manifest's limit is half of that
PIECE, PIECE_SECONDS = 2**15, 60.0  # the slowest pace of a stream; many may share a slow line

SPARE_ENDS = 64
CONNECTIONS = {"connLo": 1_536, "connHi": 2_048}  # 75 KiB each

_hivemind_cancel = StepControl.cancel
_process_args = P2P._make_process_args
_store = TimedStorage.store


def apply() -> None:
    """Make all changes that a DHT node and an averager need."""
    StepControl.cancel = cancel_before_telling
    p2p_client.ControlClient = DaemonConnection
    hivemind.dht.protocol.AuthRPCWrapper = AuthorizedByPeerId
    hivemind.dht.dht.DHTNode = DHTNode
    hivemind.dht.node.DHTProtocol, hivemind.dht.protocol.RoutingTable = DHTProtocol, RoutingTable
    P2P._make_process_args = staticmethod(roomy_daemon)
    P2P.receive_protobuf = staticmethod(receive_bounded)
    P2P.send_raw_data = staticmethod(send_bounded)
    TimedStorage.store = store_with_one_end
    hivemind.utils.tensor_descr._safe_check_pinned = never_pinned


def never_pinned(tensor: torch.Tensor) -> bool:
    """Answer hivemind that a tensor that travels is not pinned: it would ask CUDA, and who did must not fork."""
    return False


def store_with_one_end(storage: TimedStorage[Any, Any], key: Any, value: Any, expiration_time: float) -> bool:
    """Store as hivemind does, and forget the ends of what was replaced.

    It keeps each until that time has come: who renews its record without pause would fill the node's memory.
    """
    stored = _store(storage, key, value, expiration_time)
    if len(storage.expiration_heap) > 2 * len(storage.data) + SPARE_ENDS:
        storage.expiration_heap = sorted(storage.key_to_heap.values(), key=lambda entry: entry.expiration_time)
    return bool(stored)


def roomy_daemon(*command: object, **flags: object) -> list[str]:
    """Start p2pd with room for the connections of a large swarm.

    By itself it closes all but 256 as soon as there are 512, whatever is on its way over them.
    """
    return list(_process_args(*command, **flags, **CONNECTIONS))


def cancel_before_telling(control: StepControl) -> bool:
    """Have a step control count as cancelled before its averager hears of it.

    The averager looks whether it is when it hears of it. Told first, it went on, and made a round that its trainer had
    given up, and repeated in another group, while the other members stepped.
    """
    MPFuture.cancel(control)
    return bool(_hivemind_cancel(control))


class InTurn:
    """The end of a pipe on which threads send, one at a time: of a long message others would get between the parts.

    The lock is shared with processes that are forked later: an averager's asks the DHT's on it, too.
    """

    def __init__(self, pipe: Connection):
        self._pipe, self._turn = pipe, multiprocessing.Lock()

    def send(self, message: object) -> None:
        """Send one message, as a whole."""
        with self._turn:
            self._pipe.send(message)

    def close(self) -> None:
        """Send no more."""
        self._pipe.close()


def take_long_messages(process: DHT | DecentralizedAverager) -> None:
    """Have a process that runs take messages of more than 16 KiB, such as a manifest or the ids of 400 peers, whole.

    uvloop made the pipe non-blocking, for both: such a message is written in parts, and read before all are there, or
    with another thread's between them. All that comes after it is rubbish, so the process would hear nothing any more.
    """
    os.set_blocking(process._inner_pipe.fileno(), True)  # hivemind polls before it reads
    process._outer_pipe = InTurn(process._outer_pipe)


class PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """Calls that wait for their answer; one that was given up does not, though its caller has yet to remove it.

    An answer that came in that very moment ended the task that reads all answers, and every call after it hung.
    """

    def __contains__(self, call: object) -> bool:
        answer = self.get(call) if isinstance(call, UUID) else None
        return answer is not None and not answer.done()


class HandlerTasks(dict[UUID, "asyncio.Task[None]"]):
    """Calls of others that this node answers; hivemind keeps for ever what its caller gave up."""

    def __setitem__(self, call: UUID, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


class DaemonConnection(ControlClient):
    """A node's connection with its libp2p daemon, which outlives calls that are given up."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._pending_calls, self._handler_tasks = PendingCalls(), HandlerTasks()


class AuthorizedByPeerId:
    """A DHT node's methods; its authorizer is told which peer calls, and has passes shown on the node's connections.

    hivemind's wrapper does not say who calls, and expects a signature of each message instead.
    """

    def __init__(self, stub: Any, role: AuthRole, authorizer: DHTAuthorizer | None, **more: Any):
        self._stub, self._serves, self._authorizer = stub, role == AuthRole.SERVICER, authorizer
        if authorizer is not None:
            authorizer.guard(stub.p2p if self._serves else stub._p2p)

    def __getattr__(self, name: str) -> Any:
        method, node, authorizer = getattr(self._stub, name), self._stub, self._authorizer
        if authorizer is None or not self._serves:
            return method

        async def served(request: Any, context: P2PContext) -> Any:
            return await authorizer.serve(node, method, request, context)

        return served


async def receive_bounded(kind: type[Message], reader: Any) -> tuple[Message | None, RPCError | None]:
    """Receive a message as hivemind does, of a largest size and at a slowest pace: see `network/stream_limits.py`.

    hivemind reads as many bytes as a message's header says, for as long as that takes. Raises IncompleteReadError, as
    for a connection that broke, for what is too large or too slow.
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


async def send_bounded(data: bytes, writer: Any, *, chunk_size: int = PIECE) -> None:
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

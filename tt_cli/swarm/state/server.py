"""Hands this peer's state to others: one copy of it at a time, however many take it.

The copy is made for the first one who asks and lives while it is read and some seconds longer, so that a taker whose
connection broke can go on where it stopped. Who asks for another state meanwhile is offered this one. A taker asks
for some chunks at a time, on one stream: it shares them out among several donors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.identity.rate_limit import Crowded, Places
from tt_cli.swarm import wire
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader

logger = get_logger(__name__)

SNAPSHOT_SECONDS = 60.0  # to wait for the host process: it may be making a step
LINGER_SECONDS = 15.0
STALL_SECONDS = 30.0  # a taker that reads nothing for so long does not keep the copy alive
IDLE_SECONDS = 120.0  # a taker that asks for nothing: it may wait for other donors
MAX_TAKERS, MAX_OF_ONE = 16, 4  # streams: of all, and of one user; in an open run, of one peer

Offer = Callable[[], Awaitable[tuple[bytes, StateBuffer] | None]]
"""Manifest and bytes of the present state; None: there is none yet."""


class Unavailable(Exception):
    """Nothing can be handed over now; the words are for the one who asked."""


class StateServer(ServicerBase):
    """The libp2p service. offer: makes the copy. read_tree: its manifest's tree. on_sent: told of bytes sent.

    membership: who may take it, looked at with every request.
    """

    def __init__(self, offer: Offer, read_tree: TreeReader, on_sent: Callable[[int], None], membership: Admission):
        self._offer, self._read_tree, self._on_sent = offer, read_tree, on_sent
        self._membership = membership
        self._snapshot: _Snapshot | None = None
        self._making: asyncio.Task[_Snapshot | None] | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._places = Places(MAX_OF_ONE, MAX_TAKERS)

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """Answer the first request with a refusal or the manifest, and each with the chunks it asks for, in order."""
        taker = str(context.remote_id)
        try:
            with self._places.one(self._membership.admit_again(taker).casefold() or taker):
                request = await self._next_request(requests, taker)
                if request is None:
                    return
                snapshot = await self._snapshot_for(request[0])
                with snapshot.read():
                    yield wire.STATE_ANSWER.message(("manifest", snapshot.manifest))
                    if request[0] != snapshot.tree.digest:  # the manifest says that it is another one
                        request = await self._next_request(requests, taker)
                    while request is not None:
                        for index in snapshot.asked_for(*request):
                            data = snapshot.chunk(index)
                            self._on_sent(len(data))
                            yield wire.STATE_ANSWER.message(("chunk", index, data))
                        request = await self._next_request(requests, taker)
        except Crowded:
            yield wire.STATE_ANSWER.message(("refused", "it hands its state to as many as it can"))
        except (Unavailable, NotAdmitted) as error:
            yield wire.STATE_ANSWER.message(("refused", str(error)[:200]))

    async def _next_request(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], taker: str
    ) -> tuple[str, tuple[int, ...]] | None:
        """None when the taker hung up or asks for nothing any more.

        Raises Unavailable for what is no request, NotAdmitted: a stream may last longer than a pass.
        """
        message = None
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                message = await anext(requests, None)
        if message is None:
            return None
        self._membership.admit_again(taker)
        try:
            return wire.STATE_REQUEST.read(message)
        except wire.MalformedMessage:
            raise Unavailable("the request cannot be read") from None

    async def _snapshot_for(self, digest: str) -> _Snapshot:
        """The copy with this digest; or the one that is being read; or a new one of the present state."""
        if self._making is None:
            snapshot = self._snapshot
            if snapshot is not None and (snapshot.tree.digest == digest or snapshot.read_now()):
                return snapshot
            self._making = asyncio.create_task(self._make())
        try:
            made = await asyncio.wait_for(asyncio.shield(self._making), SNAPSHOT_SECONDS)
        except TimeoutError:
            raise Unavailable("it is busy") from None
        if made is None:
            raise Unavailable("it has no state yet")
        return made

    async def _make(self) -> _Snapshot | None:
        if self._snapshot is not None:
            self._snapshot.close()  # before the next one: there is memory for one
        self._snapshot = None
        try:
            offered = await self._offer()
            if offered is not None:
                manifest, buffer = offered
                tree = await asyncio.to_thread(self._read_tree, manifest)
                self._snapshot = _Snapshot(tree, manifest, buffer)
                self._freeing = asyncio.create_task(self._free_when_idle(self._snapshot))
        except Exception as error:  # told to the taker as having none; here it is a defect, so it is logged
            logger.warning(f"no copy of the state was made: {error!r}")
        finally:
            self._making = None
        return self._snapshot

    async def _free_when_idle(self, snapshot: _Snapshot) -> None:
        """Free it when nobody has read it for some seconds."""
        while self._snapshot is snapshot:
            left = snapshot.kept_until() - loop_time()
            if left <= 0:
                snapshot.close()
                self._snapshot = None
            await asyncio.sleep(min(left, LINGER_SECONDS))


class _Snapshot:
    """One copy of the state and those who read it."""

    def __init__(self, tree: Tree, manifest: bytes, buffer: StateBuffer):
        self.tree, self.manifest, self._buffer = tree, manifest, buffer
        self._readers = 0
        self._read_at = loop_time()

    @contextmanager
    def read(self) -> Iterator[None]:
        """A context in which one more taker is under way."""
        self._readers, self._read_at = self._readers + 1, loop_time()
        try:
            yield
        finally:
            self._readers -= 1

    def read_now(self) -> bool:
        """True while a taker is under way."""
        return self._readers > 0 and loop_time() < self._read_at + STALL_SECONDS

    def kept_until(self) -> float:
        """When it may be freed (monotonic seconds), as it looks now."""
        return self._read_at + (STALL_SECONDS if self._readers else LINGER_SECONDS)

    def asked_for(self, digest: str, runs: tuple[int, ...]) -> Iterator[int]:
        """The chunks in these runs of the state with that digest. Raises Unavailable where this one has none such."""
        if digest != self.tree.digest:
            raise Unavailable("it holds another state")
        if runs and runs[-1] > len(self.tree):
            raise Unavailable("there is no such chunk")
        return chain.from_iterable(map(range, runs[::2], runs[1::2]))

    def chunk(self, index: int) -> bytes:
        """Its bytes. Raises Unavailable when another copy replaced this one: its reader had stalled."""
        try:
            data = self._buffer.read(*self.tree.place(index))
        except ValueError:
            raise Unavailable("it does not hold that state any more") from None
        self._read_at = loop_time()
        return data

    def close(self) -> None:
        self._buffer.close()

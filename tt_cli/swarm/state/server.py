"""Hands this peer's state to others: one copy of it at a time, however many take it.

The copy is made for the first one who asks and lives while it is read and some seconds longer, so that a taker whose
connection broke can go on where it stopped. Who asks for another state meanwhile is offered this one. A taker asks
for some chunks at a time, on one stream: it shares them out among several donors.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.swarm import wire
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader

logger = get_logger(__name__)

SNAPSHOT_SECONDS = 60.0  # to wait for the host process: it may be making a step
LINGER_SECONDS = 15.0
STALL_SECONDS = 30.0  # a taker that reads nothing for so long does not keep the copy alive
IDLE_SECONDS = 120.0  # a taker that asks for nothing: it may wait for other donors
MAX_TAKERS, MAX_OF_ONE = 16, 2

Offer = Callable[[], Awaitable[tuple[bytes, StateBuffer] | None]]
"""Manifest and bytes of the present state; None: there is none yet."""


class Unavailable(Exception):
    """Nothing can be handed over now; the words are for the one who asked."""


class StateServer(ServicerBase):
    """The libp2p service. offer: makes the copy. read_tree: its manifest's tree. on_sent: told of bytes sent.

    membership: who may take it, looked at with every request; None for anybody.
    """

    def __init__(
        self,
        offer: Offer,
        read_tree: TreeReader,
        on_sent: Callable[[int], None] = lambda count: None,
        membership: Admission | None = None,
    ):
        self._offer, self._read_tree, self._on_sent = offer, read_tree, on_sent
        self._membership = membership
        self._snapshot: _Snapshot | None = None
        self._making: asyncio.Task[_Snapshot | None] | None = None
        self._takers: Counter[str] = Counter()

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """Answer the first request with a refusal or the manifest, and each with the chunks it asks for, in order."""
        taker = str(context.remote_id)
        if self._takers.total() >= MAX_TAKERS or self._takers[taker] >= MAX_OF_ONE:
            yield wire.STATE_ANSWER.message(("refused", "it hands its state to as many as it can"))
            return
        self._takers[taker] += 1
        try:
            admitted = self._admitted(requests, taker)
            if (first := await _next_request(admitted)) is not None:
                snapshot = await self._snapshot_for(first[0])
                async for answer in snapshot.answers(*first, admitted, self._on_sent):
                    yield answer
        except (Unavailable, NotAdmitted) as error:
            yield wire.STATE_ANSWER.message(("refused", str(error)[:200]))
        finally:
            self._takers[taker] -= 1

    async def _admitted(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], taker: str
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """The requests of a member: a stream may last longer than a pass. Raises NotAdmitted when it counts no more."""
        async for request in requests:
            if self._membership is not None:
                self._membership.admit_again(taker)
            yield request

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
                self._free_later(self._snapshot)
        except Exception as error:  # told to the taker as having none; here it is a defect, so it is logged
            logger.warning(f"no copy of the state was made: {error!r}")
        finally:
            self._making = None
        return self._snapshot

    def _free_later(self, snapshot: _Snapshot) -> None:
        """Free it when nobody has read it for some seconds; look again then."""
        loop = asyncio.get_running_loop()

        def free() -> None:
            if self._snapshot is not snapshot:
                return
            left = snapshot.kept_until() - time.monotonic()
            if left > 0:
                loop.call_later(min(left, LINGER_SECONDS), free)
            else:
                snapshot.close()
                self._snapshot = None

        loop.call_later(LINGER_SECONDS, free)


class _Snapshot:
    """One copy of the state and those who read it."""

    def __init__(self, tree: Tree, manifest: bytes, buffer: StateBuffer):
        self.tree, self._manifest, self._buffer = tree, manifest, buffer
        self._readers = 0
        self._read_at = time.monotonic()

    def read_now(self) -> bool:
        """True while a taker is under way."""
        return self._readers > 0 and time.monotonic() < self._read_at + STALL_SECONDS

    def kept_until(self) -> float:
        """When it may be freed (monotonic seconds), as it looks now."""
        return self._read_at + (STALL_SECONDS if self._readers else LINGER_SECONDS)

    async def answers(
        self,
        digest: str,
        runs: tuple[int, ...],
        requests: AsyncIterator[runtime_pb2.ExpertInfo],
        on_sent: Callable[[int], None],
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """The manifest; then the chunks in the runs, if this is the state asked for; then those of later requests."""
        self._readers += 1
        try:
            self._read_at = time.monotonic()
            yield wire.STATE_ANSWER.message(("manifest", self._manifest))
            runs = runs if digest == self.tree.digest else ()  # the manifest says that it is another one
            asked: tuple[str, tuple[int, ...]] | None = digest, runs
            while asked is not None:
                _, runs = asked
                if runs and runs[-1] > len(self.tree):
                    raise Unavailable("there is no such chunk")
                for first, end in zip(runs[::2], runs[1::2], strict=True):
                    for index in range(first, end):
                        yield self._chunk(index, on_sent)
                asked = await _next_request(requests)
                if asked is not None and asked[0] != self.tree.digest:
                    raise Unavailable("it holds another state")
        finally:
            self._readers -= 1

    def _chunk(self, index: int, on_sent: Callable[[int], None]) -> runtime_pb2.ExpertInfo:
        offset, size = self.tree.place(index)
        try:
            data = self._buffer.read(offset, size)
        except ValueError:  # another one replaced it: this taker had stalled
            raise Unavailable("it does not hold that state any more") from None
        self._read_at = time.monotonic()
        on_sent(size)
        return wire.STATE_ANSWER.message(("chunk", index, data))

    def close(self) -> None:
        self._buffer.close()


async def _next_request(requests: AsyncIterator[runtime_pb2.ExpertInfo]) -> tuple[str, tuple[int, ...]] | None:
    """None when the taker hung up or asks for nothing any more. Raises Unavailable for what is no request."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            message = await anext(requests, None)
    except TimeoutError:
        return None
    try:
        return None if message is None else wire.STATE_REQUEST.read(message)
    except wire.MalformedMessage:
        raise Unavailable("the request cannot be read") from None

"""Hands this peer's state to others: one copy of it at a time, however many take it.

The copy is made for the first one who asks and lives while it is read and some seconds longer, so that a taker whose
connection broke can go on where it stopped. Who asks for another state meanwhile is offered this one while it is new.
A taker asks for some chunks at a time, on one stream: it shares them out among several donors.

A peer that takes a state itself hands on what came of it, from the memory where it lies. All who hand over say what
they hold, what of it they gave to somebody, and who else takes it: so a crowd shares out what it asks of the few who
hold all, and the rest goes from taker to taker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import numpy as np
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.identity.rate_limit import Crowded, Places, RateLimit
from tt_cli.swarm import wire
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader

logger = get_logger(__name__)

SNAPSHOT_SECONDS = 60.0  # to wait for the host process: it may be making a step
LINGER_SECONDS = 15.0
NEW_SECONDS = 3.0  # later who asks for another state has not seen this one signed, and would take it for a false one
STALL_SECONDS = 30.0  # a taker that reads nothing for so long does not keep the copy alive
TURN_SECONDS, TURN_BYTES = 600.0, 1e6 / 8  # a copy is read so long, or at 1 Mbit/s: then who wants a later one has it
IDLE_SECONDS = 120.0  # a taker that asks for nothing: it may wait for other donors
MAX_TAKERS, MAX_OF_ONE = 16, 4  # streams: of all, and of one user; in an open run, of one peer
COPIED, COPIED_AT_ONCE = 2.0**24, 2.0**32  # bytes of copies for one user, each of which holds up a step: a second
SENDING, SENDING_TO_ONE = 4, 2  # of those, on which chunks go out at once: what is on its way when a round begins

Offer = Callable[[], Awaitable[tuple[bytes, StateBuffer] | None]]
"""Manifest and bytes of the present state; None: there is none yet."""


class Unavailable(Exception):
    """Nothing can be handed over now; the words are for the one who asked."""


async def at_once(count: int) -> bool:
    """Let so many bytes go."""
    return True


class StateServer(ServicerBase):
    """The libp2p service. offer: makes the copy. read_tree: its manifest's tree. on_sent: told of bytes sent.

    membership: who may take it, looked at with every request. give_way: waits until so many bytes may go out; False:
    not soon.
    """

    def __init__(
        self,
        offer: Offer,
        read_tree: TreeReader,
        on_sent: Callable[[int], None],
        membership: Admission,
        give_way: Callable[[int], Awaitable[bool]] = at_once,
    ):
        self._offer, self._read_tree, self._on_sent = offer, read_tree, on_sent
        self._membership, self._give_way = membership, give_way
        self._snapshot: StateCopy | None = None
        self._lent: StateCopy | None = None
        self._making: asyncio.Task[StateCopy | None] | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._places, self._sending = Places(MAX_OF_ONE, MAX_TAKERS), Places(SENDING_TO_ONE, SENDING)
        self._copied, self._size = RateLimit(COPIED_AT_ONCE, COPIED, clock=loop_time), 1.0

    def lend(self, copy: StateCopy) -> None:
        """Hand on, too, what has come of the state that this peer takes now."""
        self._lent = copy

    def end_lending(self, complete: bool) -> None:
        """The state was taken, or given up. While a complete one is read it takes the place of this peer's copy."""
        copy, self._lent = self._lent, None
        if copy is not None and complete and copy.under_way():
            self._keep(copy)
        elif copy is not None:
            copy.close()

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """Answer the first request with a refusal or the manifest, each with its chunks, in order, and what is held.

        Chunks that could not go out soon are not sent: a round comes first, or others have their turn.
        """
        taker, others = str(context.remote_id), tuple[str, ...]()
        try:
            if copy := self._lent or self._snapshot:
                others = copy.others(taker)
            user = self._membership.admit_again(taker).casefold() or taker
            with self._places.one(user):
                request = await self._next_request(requests, taker)
                if request is None:
                    return
                copy = await self._copy_for(request[0], user)
                with copy.read(taker, hands_on=request[2]) as owed:
                    yield wire.STATE_ANSWER.message(("manifest", copy.manifest))
                    if request[0] != copy.tree.digest:  # the manifest says that it is another one
                        request = await self._next_request(requests, taker)
                    while request is not None:
                        copy.promise(owed, *request[:2])
                        with suppress(Crowded), self._sending.one(user):
                            while owed and await self._give_way(copy.tree.place(owed[0])[1]):
                                data = copy.chunk(owed[0])
                                self._on_sent(len(data))
                                yield wire.STATE_ANSWER.message(("chunk", owed.popleft(), data))
                        copy.release(owed)
                        yield wire.STATE_ANSWER.message(("held", *copy.bits(), copy.others(taker)))
                        request = await self._next_request(requests, taker)
        except Crowded:
            yield wire.STATE_ANSWER.message(("refused", "it hands its state to as many as it can", others))
        except (Unavailable, NotAdmitted) as error:
            yield wire.STATE_ANSWER.message(("refused", str(error)[:200], ()))

    async def _next_request(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], taker: str
    ) -> tuple[str, tuple[int, ...], bool] | None:
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

    async def _copy_for(self, digest: str, user: str = "") -> StateCopy:
        """The copy with this digest; or one that is taken or read now; or a new one of the present state.

        Raises Unavailable, Crowded for more copies than a user may have made.
        """
        snapshot = self._snapshot if self._making is None else None
        for copy in filter(None, (self._lent, snapshot)):
            if copy.tree.digest == digest or (copy.read_now() and copy is not self._lent and copy.new()):
                return copy
        if self._lent is not None:  # nobody wants the state that this peer leaves
            return self._lent
        if snapshot is not None and snapshot.read_now():
            raise Unavailable("it hands an older state to others")
        if self._making is None:
            self._copied.charge(user, self._size)
            self._making = asyncio.create_task(self._make())
        try:
            made = await asyncio.wait_for(asyncio.shield(self._making), SNAPSHOT_SECONDS)
        except TimeoutError:
            raise Unavailable("it is busy") from None
        if made is None:
            raise Unavailable("it has no state yet")
        return made

    async def _make(self) -> StateCopy | None:
        if self._snapshot is not None:
            self._snapshot.close()  # before the next one: there is memory for one
        self._snapshot = None
        try:
            offered = await self._offer()
            if offered is not None:
                manifest, buffer = offered
                made = StateCopy(await asyncio.to_thread(self._read_tree, manifest), buffer)
                if self._snapshot is None:  # else this peer took a state meanwhile, and others read that
                    self._keep(made)
        except Exception as error:  # told to the taker as having none; here it is a defect, so it is logged
            logger.warning(f"no copy of the state was made: {error!r}")
        finally:
            self._making = None
        return self._snapshot

    def _keep(self, copy: StateCopy) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot, self._size = copy, float(copy.tree.nbytes)
        self._freeing = asyncio.create_task(self._free_when_idle(copy))

    async def _free_when_idle(self, copy: StateCopy) -> None:
        """Free it when nobody has read it for some seconds."""
        while self._snapshot is copy:
            left = copy.kept_until() - loop_time()
            if left <= 0:
                copy.close()
                self._snapshot = None
            await asyncio.sleep(min(left, LINGER_SECONDS))


class StateCopy:
    """A state in memory, as far as it is there, and those who read it.

    held: (chunks,) bool, those that are there; default: all. While a state is taken there are more and more.
    """

    def __init__(self, tree: Tree, buffer: StateBuffer, held: np.ndarray | None = None):
        self.tree, self.manifest, self._buffer = tree, tree.manifest(), buffer
        self._held = np.ones(len(tree), bool) if held is None else held
        self._given = np.zeros(len(tree), np.int32)  # how often each was sent, or is about to be
        self._takers: dict[str, None] = {}  # those who hand on
        self._readers = 0
        self._read_at = self._made_at = loop_time()

    @contextmanager
    def read(self, taker: str, hands_on: bool) -> Iterator[deque[int]]:
        """A context in which one more taker is under way. Yields the chunks that it was promised."""
        owed = deque[int]()
        self._readers, self._read_at = self._readers + 1, loop_time()
        self._takers |= {taker: None} if hands_on else {}
        try:
            yield owed
        finally:
            self._readers -= 1
            self._takers.pop(taker, None)
            self.release(owed)

    def under_way(self) -> bool:
        """True while somebody takes it."""
        return self._readers > 0 and loop_time() < self._read_at + STALL_SECONDS

    def read_now(self) -> bool:
        """True while somebody takes it, and has not had the time for all of it."""
        turn = max(TURN_SECONDS, self.tree.nbytes / TURN_BYTES)
        return self.under_way() and loop_time() < self._made_at + turn

    def new(self) -> bool:
        """True while those who ask for a later state may have seen this one signed."""
        return loop_time() < self._made_at + NEW_SECONDS

    def kept_until(self) -> float:
        """When it may be freed (monotonic seconds), as it looks now."""
        return self._read_at + (STALL_SECONDS if self._readers else LINGER_SECONDS)

    def others(self, taker: str) -> tuple[str, ...]:
        """Some of those who take it too and hand on, in turns."""
        listed = [other for other in self._takers if other != taker][: wire.MOST_LISTED]
        for other in listed:
            self._takers[other] = self._takers.pop(other)
        return tuple(listed)

    def bits(self) -> tuple[bytes, bytes]:
        """Which chunks are there, and which of them somebody was given."""
        held, given = (np.packbits(chunks, bitorder="little") for chunks in (self._held, self._given > 0))
        return held.tobytes(), given.tobytes()

    def promise(self, owed: deque[int], digest: str, runs: tuple[int, ...]) -> None:
        """Owe the chunks in these runs of the state with that digest. Raises Unavailable where it has none such."""
        if digest != self.tree.digest:
            raise Unavailable("it holds another state")
        if runs and runs[-1] > len(self.tree):
            raise Unavailable("there is no such chunk")
        self._read_at = loop_time()
        owed.extend(chain.from_iterable(map(range, runs[::2], runs[1::2])))
        self._given[list(owed)] += 1

    def release(self, owed: deque[int]) -> None:
        """Owe them no more."""
        self._given[list(owed)] -= 1
        owed.clear()

    def chunk(self, index: int) -> bytes:
        """Its bytes. Raises Unavailable when another copy replaced this one: its reader had stalled."""
        if not self._held[index]:
            raise Unavailable("it does not hold that chunk")
        try:
            data = self._buffer.read(*self.tree.place(index))
        except ValueError:
            raise Unavailable("it does not hold that state any more") from None
        self._read_at = loop_time()
        return data

    def close(self) -> None:
        self._buffer.close()

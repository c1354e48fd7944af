"""The transfer of one round: every member ends with the same bytes of every part, or knows which parts it lacks.

hivemind's runner sends each member its own quantised *difference* from the average, so members drift apart. Here the
reducer of a part encodes the average once and sends those bytes to all; what did not come stays missing, and
`commit.py` sees to it. The messages are hivemind's. What a member sends it has signed, and a reducer signs what it made
of it (messages.py): see audits.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import aiter_with_timeout

from tt_cli.swarm.allreduce.average_buffer import MISSING, AverageBuffer
from tt_cli.swarm.allreduce.clipping.centered_clip import FEWEST, Aggregation, spread
from tt_cli.swarm.allreduce.lateness import beyond_most, longer_of
from tt_cli.swarm.allreduce.messages import Commitment, Inputs, NotProven, Opening, Signer, input_hash
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.allreduce.round_plan import RoundGroup
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.codec import MalformedPart
from tt_cli.swarm.compression.gradient_buffer import NOBODY, GradientBuffer

logger = get_logger(__name__)

SENT, AVERAGED = averaging_pb2.PART_FOR_AVERAGING, averaging_pb2.AVERAGED_PART
BEYOND = 1e3  # times the norm of this peer's gradient or of the last average: no part of an average is so large
SENDING = 0.5  # of the time for a round: so long a sender may take for all its parts
ANSWERING = 1.4  # times as long as senders may send, a reducer may answer
ANSWERS = 8  # to the audits of one member, beside one for each member's part


def too_few(used: int, members: int) -> bool:
    """True if nobody steps with an average of what so many of the members sent: nobody, or half of them or less."""
    return not used or (members >= FEWEST and 2 * used <= members)


class BrokenTransfer(Exception):
    """Another member did not keep to the protocol, or went away."""


class AllReduce:
    """One member's side of the transfer of one round.

    signer: signs for this peer. local: its mean gradient. weight: the samples behind it. store: receives the average.
    usual: norm of the last average, 0 when there is none.

    rejected: peer id → why what it sent, or some of it, was refused. failed: reducer → why its averages did not all
    come. inputs, commitment: what this peer reduced, packed, and its signed commitment to it; b"" where it reduced
    nothing. signed: other reducer → its commitment, where all of its averages came. used: of how many members it used
    all parts; of all where it reduced nothing. openings: sender to this peer → its signed opening. absent: members
    that are known to be away before it begins.
    """

    def __init__(
        self,
        group: RoundGroup,
        signer: Signer,
        local: GradientBuffer,
        weight: float,
        store: AverageBuffer,
        aggregation: Aggregation,
        usual: float = 0.0,
    ):
        self.group, self.name, self.group_id, self.me = group, group.name, group.name.group_id, group.me
        self.members, self.reducers = group.members, group.reducers
        self.stub_of, self.traffic = group.stub_of, group.traffic
        self.patience, self.longest = group.patience, SENDING * group.longest
        self.store, self.codec, self.weight = store, local.codec, weight
        self._local, self.signer, self._aggregation, self._usual = local, signer, aggregation, usual
        self.parts = group.cut(store.layout)
        self._indexes: dict[PeerID, list[int]] = {reducer: [] for reducer in self.reducers}  # of the parts of each
        for index, part in enumerate(self.parts):
            if part.reducer != NOBODY:
                self._indexes[self.reducers[part.reducer]].append(index)
        self.absent: frozenset[str] = frozenset()
        self.rejected: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._started: set[PeerID] = set()
        self._ended: dict[str, float] = {}  # reducer → when the exchange with it ended
        self._own = self.parts_of(self.me)
        parts = [self.parts[index] for index in self._own]
        self.reducer = Reducer(
            local.codec, parts, local, weight, str(self.me), group.limits, self._put_own, aggregation
        )
        self._norms: dict[int, float] = {}  # of the averages
        self.openings: dict[str, bytes] = {}
        self._shown: Counter[str] = Counter()  # member → answers to its audits
        self._sent: dict[int, bytes] = {}  # part → hash of what this peer signed of it
        self.inputs = self.commitment = b""
        self._committed = asyncio.Event()
        self.signed: dict[str, bytes] = {}
        self.used = len(self.members)
        self.hashes: list[bytes] = []  # the store's, while it holds this round's average

    def _put_own(self, place: int, encoded: bytes) -> None:
        self.store.put(self._own[place], encoded, self.hashes)

    def parts_of(self, reducer: PeerID) -> list[int]:
        """The indexes of its parts, none for who is no reducer."""
        return self._indexes.get(reducer, [])

    @property
    def share(self) -> float | None:
        """The share of the average that this peer reduces; None for one that accepts no connections."""
        shares = self.group.shares
        reduces = self.me in self.reducers and not self.group.locked
        return shares[self.reducers.index(self.me)] / sum(shares) if reduces else None

    def repeated(self, lost: Sequence[int], absent: frozenset[str], seconds: float) -> AllReduce:
        """The transfer of the parts that these reducers (positions) left, to their backups, into the same store.

        seconds: until the round ends.
        """
        group = replace(self.group, name=self.name.repeated(lost), longest=seconds)
        again = type(self)(group, self.signer, self._local, self.weight, self.store, self._aggregation, self._usual)
        again.hashes, again._spread, again.absent = self.hashes, self._spread, absent
        for index, part in enumerate(again.parts):
            if part.reducer != NOBODY:
                self.hashes[index] = MISSING
                self._norms.pop(index, None)
        return again

    async def run(self) -> None:
        """Send, reduce and receive until nothing more can come. What other members do wrong is told, not raised."""
        if self.group.locked:  # what is here of it stays, the rest is fetched
            self.hashes = self.hashes if self.store.hashes is self.hashes else self.store.open(self.group.shares)
            return
        if not self.name.lost:
            self.hashes = self.store.open(self.group.shares)
            self._spread = spread(self._local, self.parts)
        self.reducer.spreads[str(self.me)] = self._spread
        for member in self.absent:
            await self.reducer.fail(member, "was not heard")
        there = (reducer for reducer in self.reducers if reducer != self.me and str(reducer) not in self.absent)
        others = [reducer for reducer in there if self.parts_of(reducer)]
        watch = asyncio.create_task(self._miss_senders()) if self._own else None
        try:
            async with asyncio.TaskGroup() as together:
                together.create_task(self._reduce())
                for reducer in others:
                    together.create_task(self._exchange(reducer))
        finally:
            if watch is not None:
                watch.cancel()

    async def _reduce(self) -> None:
        try:
            await self.reducer.run()
            if self._own:
                await self._commit()
        finally:
            self._committed.set()

    async def _commit(self) -> None:
        self.openings[str(self.me)] = (await self._opening(self.me)).sign(self.signer)
        senders = [str(member) for member in self.members if self.reducer.used(str(member))]
        inputs = Inputs(tuple(map(self.openings.__getitem__, senders)), tuple(map(self.reducer.used, senders)))
        self.inputs, self.used = inputs.pack(), inputs.used.count(len(self._own))
        place, outputs = self.reducers.index(self.me), tuple(self.hashes[index] for index in self._own)
        digest = hashlib.sha256(self.inputs).digest()
        commitment = Commitment(self.name, str(self.me), self.group.shares, place, self.used, digest, outputs)
        self.commitment = commitment.sign(self.signer)
        self.used = 0 if self.reducer.empty else self.used

    def gone(self) -> set[str]:
        """Members that seem to be away: they stopped sending, and did not answer if they have parts to reduce."""
        silent = self.failed.keys() | {str(member) for member in self.members if not self.parts_of(member)}
        return (silent & self.reducer.failed.keys()) | self.absent

    def waits(self) -> dict[str, float]:
        """Member → seconds for which this one waited for it, as reducer and for its averages, longer than for most."""
        return longer_of(self.reducer.waited, beyond_most(self._ended))

    def show(self, asker: str, reducer: str, index: int | None) -> bytes:
        """What this peer sent, or as a reducer received, for another member's audit. Raises ValueError.

        index: of the part among the reducer's; None for the list of this peer's inputs.
        """
        known = {str(member): member for member in self.members}
        if asker not in known or reducer not in known:
            raise ValueError("not a member of this round")
        self._shown[asker] += 1
        if self._shown[asker] > ANSWERS + len(self.members):
            raise ValueError("asked too often")
        if index is None:
            return self.inputs
        indexes = self.parts_of(known[reducer])
        if not 0 <= index < len(indexes):
            raise ValueError("no such part")
        shown = self.encoded(indexes[index])
        if input_hash(shown) != self._sent.get(indexes[index]):
            raise ValueError("it is overwritten with what nobody has been sent yet")
        return shown

    # ---------------------------------------------------------------- as a sender

    async def _exchange(self, reducer: PeerID) -> None:
        """Send this peer's share of the gradient to one reducer and take its averages, checked."""
        indexes, received = self.parts_of(reducer), 0
        try:
            opening = (await self._opening(reducer)).sign(self.signer)
            async with asyncio.timeout(ANSWERING * self.longest):
                opened = self.stub_of(reducer).rpc_aggregate_part(self._opened(opening, self._outgoing(indexes)))
                stream = await asyncio.wait_for(opened, 2 * self.patience)  # who fell silent may take minutes
                async with aclosing(stream):
                    async for message in aiter_with_timeout(stream, 2 * self.patience):
                        self._keep(indexes[received], message)
                        received += 1
                        if received == len(indexes):
                            if message.peer_id:
                                self.signed[str(reducer)] = message.peer_id
                            break
            if received != len(indexes):
                raise BrokenTransfer(f"it sent {received} of {len(indexes)} parts")
        except Exception as error:  # P2P errors of many types; the round goes on without this reducer
            if isinstance(error, MalformedPart):
                self.rejected[str(reducer)] = f"sent back {error}"
            self.failed[str(reducer)] = str(error) or type(error).__name__
            logger.info(f"the exchange with reducer {reducer} failed: {error!r}")
            if reducer not in self._started:  # who does not answer will not begin to send
                await self.reducer.fail(str(reducer), "did not answer")
        finally:
            self._ended[str(reducer)] = loop_time()

    def _keep(self, index: int, message: averaging_pb2.AveragingData) -> None:
        if message.code != AVERAGED:
            raise BrokenTransfer(f"it answered {averaging_pb2.MessageCode.Name(message.code)}")
        part = self.parts[index]
        self.traffic[1] += len(message.tensor_part.buffer)
        encoded = self.store.codec.read_part(message.tensor_part, part.elements, part.large)
        most = BEYOND * max(self._usual, self._spread * math.sqrt(self.store.layout.size))
        self._norms[index] = self.store.codec.most_norm(encoded, part.elements, part.large)
        if most and not self._norms[index] <= most:
            raise MalformedPart(f"an average beyond {BEYOND:g} times what is usual")
        self.store.put(index, encoded, self.hashes)

    def encoded(self, index: int) -> bytes:
        """A part of this peer's gradient, as it signs and sends it."""
        return self._local.read(self.parts[index].start, self.parts[index].stop)

    def norm_of_average(self) -> float:
        """The norm of the whole average in the store, at most."""
        for index, part in enumerate(self.parts):
            if index not in self._norms:
                self._norms[index] = self.store.codec.most_norm(self.store.get(index), part.elements, part.large)
        return math.sqrt(sum(norm * norm for norm in self._norms.values()))

    async def _opening(self, reducer: PeerID) -> Opening:
        hashes = []
        for index in self.parts_of(reducer) if self.weight else ():
            hashes.append(input_hash(self.encoded(index)))
            await asyncio.sleep(0)  # let others in
        self._sent |= dict(zip(self.parts_of(reducer), hashes, strict=False))
        return Opening(self.name, str(self.me), str(reducer), float(self.weight), self._spread, tuple(hashes))

    async def _opened(
        self, opening: bytes, outgoing: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """The signed opening travels with the first part, in hivemind's field for who sends it."""
        async for message in outgoing:
            message.peer_id, opening = opening, b""
            yield message

    async def _outgoing(self, indexes: Sequence[int]) -> AsyncIterator[averaging_pb2.AveragingData]:
        """This peer's parts; without samples one message that has none."""
        if not self.weight:
            yield averaging_pb2.AveragingData(code=SENT, group_id=self.group_id)
        for index in indexes if self.weight else ():
            part = self.parts[index]
            encoded = self.codec.message(self.encoded(index), part.elements, part.large)
            self.traffic[0] += len(encoded.buffer)
            yield averaging_pb2.AveragingData(
                code=SENT, group_id=self.group_id, tensor_part=encoded, weight=self.weight
            )

    # ---------------------------------------------------------------- as a reducer

    async def _miss_senders(self) -> None:
        """Leave out senders that have not begun when patience ends, and whoever holds up the others for too long."""
        await asyncio.sleep(self.patience)
        for member in self.members:
            if member != self.me and member not in self._started:
                await self.reducer.fail(str(member), "did not begin to send")
        await asyncio.sleep(self.longest - self.patience)
        while True:
            for sender in self.reducer.holding_up():
                words = f"took more than {self.longest:.0f} s for its parts"
                if not self.name.lost:  # a repetition has what time is left
                    self.rejected[sender] = words
                await self.reducer.fail(sender, words)
            await asyncio.sleep(self.patience / 2)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """One member sends its parts and gets the averages, as they are made."""
        sender = context.remote_id
        if sender not in self.members or sender in self._started or sender == self.me:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._started.add(sender)
        taking = asyncio.create_task(self._take(stream, str(sender)))
        try:
            for position in range(len(self._own)):
                await self._made_or_refused(position, taking)
                if last := position == len(self._own) - 1:
                    await self._committed.wait()
                average = self._average(position)
                self.traffic[0] += len(average.buffer)
                signed = self.commitment if last else b""  # who has all averages has its word for them
                yield averaging_pb2.AveragingData(code=AVERAGED, tensor_part=average, peer_id=signed)
            # The sender hangs up when it has them all: the daemon may reset a stream that this side ends, and what is
            # still on its way is lost.
            await asyncio.sleep(self.patience)
        except MalformedPart as error:
            self.rejected[str(sender)] = f"sent {error}"
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
        finally:
            taking.cancel()
            await self.reducer.fail(str(sender), "went away")

    def _average(self, position: int) -> runtime_pb2.Tensor:
        """One average that was made. Raises LookupError when the store has gone on to another round."""
        index = self._own[position]
        if self.store.hashes is not self.hashes or self.hashes[index] == MISSING:
            raise LookupError("the average is gone")
        return self.store.codec.message(self.store.get(index), self.parts[index].elements, self.parts[index].large)

    async def _made_or_refused(self, position: int, taking: asyncio.Task[None]) -> None:
        """Wait for an average; raises MalformedPart when this sender sent what must be refused meanwhile."""
        waiting = asyncio.ensure_future(self.reducer.wait_for(position))
        await asyncio.wait({waiting, taking}, return_when=asyncio.FIRST_COMPLETED)
        if taking.done() and taking.exception() is not None:
            waiting.cancel()
            taking.result()
        return await waiting

    async def _take(self, stream: AsyncIterator[averaging_pb2.AveragingData], sender: str) -> None:
        """Take a sender's parts. A sender that stops half way is left out of the rest, and still gets the averages."""
        try:
            opening: Opening | None = None
            async with asyncio.timeout(None) as limit:
                for place in range(len(self._own)):
                    limit.reschedule(asyncio.get_running_loop().time() + self.patience)
                    message = await anext(stream)
                    limit.reschedule(None)
                    self.traffic[1] += len(message.tensor_part.buffer)
                    opening = opening or self._read_opening(sender, message)
                    if not opening.hashes:
                        await self.reducer.skip(sender)
                        break
                    await self.reducer.take(sender, message.tensor_part, message.weight, opening.hashes[place])
            if await anext(stream, None) is not None:  # the rest is not read: what it sent before counts
                self.rejected[sender] = "sent more parts than it was asked for"
        except MalformedPart as error:
            await self.reducer.fail(sender, str(error))
            raise
        except (StopAsyncIteration, TimeoutError):
            await self.reducer.fail(sender, "stopped sending")

    def _read_opening(self, sender: str, message: averaging_pb2.AveragingData) -> Opening:
        """The signed opening of this sender for this peer. Raises MalformedPart."""
        try:
            opening = Opening.read(message.peer_id, self.signer.opened)
        except NotProven as error:
            raise MalformedPart(f"parts without a signature ({error})") from error
        if (opening.name, opening.sender, opening.reducer) != (self.name, sender, str(self.me)):
            raise MalformedPart("parts signed for another round or by somebody else")
        if len(opening.hashes) != (len(self._own) if opening.weight else 0):
            raise MalformedPart("a signature for another number of parts")
        if opening.weight != message.weight:
            raise MalformedPart("another weight than it signed")
        self.openings[sender] = message.peer_id
        self.reducer.spreads[sender] = opening.spread
        return opening

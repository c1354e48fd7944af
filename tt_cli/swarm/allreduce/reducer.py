"""The reducer: averages of the parts that this peer is responsible for.

The members' parts are kept as they came until all members that are still there have sent the same part. Then they are
averaged (`average_part`) in the order of the members, so that the same contributions give the same bytes, and encoded
once, for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from hivemind.proto import runtime_pb2

from tt_cli.swarm.allreduce.clipping.centered_clip import LARGEST, Aggregation, ReceivedPart, average_part
from tt_cli.swarm.allreduce.messages import input_hash, may_weigh
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.codec import GradientCodec, MalformedPart
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, TensorPart

AHEAD = 32  # parts that a sender may be ahead of the slowest: bounds what a reducer keeps


class Reducer:
    """The averages of one round for which this peer is responsible.

    parts: those of this peer. own: its gradient. weight: its samples. me: its peer id. limits: see `RoundGroup`. keep:
    takes each average as it is made, its place in `parts` and its bytes.

    spreads: sender → root mean square of its whole gradient, as it says; to be filled in before its parts come.
    failed: senders that are out, with the reason; what they sent before counts. rejected: senders some of whose numbers
    were left out, with the reason. clipped: sender → parts in which it was clipped. seconds: spent on averages. waited:
    sender → seconds for which averages waited for it while more than half of the members had sent theirs. products: of
    what each two of the senders sent, (senders, senders) float64. weights: in the order in which their parts came.
    empty: nobody sent some part: its average would be zeros, with which nobody is to step.
    """

    def __init__(
        self,
        codec: GradientCodec,
        parts: Sequence[TensorPart],
        own: GradientBuffer,
        weight: float,
        me: str,
        limits: Mapping[str, float],
        keep: Callable[[int, bytes], None],
        aggregation: Aggregation = "mean",
    ):
        self.codec, self.parts, self.senders = codec, parts, list(limits)
        self._keep, self.limits, self._aggregation = keep, limits, aggregation
        self.clipped: Counter[str] = Counter()
        self.spreads: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.weights: dict[str, float] = {me: weight}
        self.made, self.empty = 0, False  # averages
        self.products = np.zeros((len(limits), len(limits)))
        self._own, self.me = own, me
        self._received: dict[str, dict[int, bytes]] = {sender: {} for sender in limits}
        self._counts = dict.fromkeys(limits, 0) | {me: len(parts)}
        self._changed = asyncio.Condition()
        self._ended = False
        self.seconds = 0.0
        self.waited: dict[str, float] = {}

    async def take(self, sender: str, message: runtime_pb2.Tensor, weight: float, signed: bytes | None = None) -> None:
        """The next part of one sender; returns when there is room for another. signed: the hash of it that was.

        Raises MalformedPart, with nothing changed, for what must not enter an average.
        """
        if sender in self.failed:
            return  # nothing more of it counts, so nothing of it is counted to be out of place
        index, most = self._counts[sender], self.limits[sender]
        if index >= len(self.parts):
            raise MalformedPart("more parts than it was asked for")
        if not may_weigh(weight, most):
            raise MalformedPart(f"weight {weight} outside 1 to {most:g}, which its samples allow")
        if self.weights.get(sender, weight) != weight:
            raise MalformedPart("a weight that changes between parts")
        part = self.parts[index]
        encoded = self.codec.read_part(message, part.elements, part.large)
        if signed is not None and input_hash(encoded) != signed:
            raise MalformedPart("a part that it did not sign")
        self.weights[sender] = weight
        async with self._changed:
            if sender in self.failed:
                return
            self._received[sender][index] = encoded
            self._counts[sender] = index + 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: sender in self.failed or index < self.made + AHEAD)

    async def skip(self, sender: str) -> None:
        """Nothing comes of this sender, which has no samples, and all averages have what it gives."""
        async with self._changed:
            if sender not in self.failed:
                self._counts[sender] = len(self.parts)
            self._changed.notify_all()

    async def fail(self, sender: str, reason: str) -> None:
        """Nothing more comes from this sender: the others do not wait for it."""
        async with self._changed:
            if self._counts[sender] < len(self.parts):
                self.failed.setdefault(sender, reason)
            self._changed.notify_all()

    def holding_up(self) -> list[str]:
        """Senders without whose next part the next average cannot be made."""
        return self._without(self.made) if self.made < len(self.parts) else []

    async def run(self) -> None:
        """Average all parts, one after the other."""
        try:
            for index in range(len(self.parts)):
                async with self._changed:
                    await self._wait_for_all(index)
                before = time.perf_counter()
                self._keep(index, self._average(index))
                self.seconds += time.perf_counter() - before
                async with self._changed:
                    self.made += 1
                    self._changed.notify_all()
        finally:
            self._ended = True
            async with self._changed:
                self._changed.notify_all()

    async def wait_for(self, index: int) -> None:
        """Return when this average has been made. Raises IndexError when it will never be."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or index < self.made)
        if index >= self.made:
            raise IndexError(f"the round ended with {self.made} of {len(self.parts)} averages")

    async def _wait_for_all(self, index: int) -> None:
        """Wait for this part of all that are still there, and note who is late."""
        while late := self._without(index):
            before = loop_time()
            await self._changed.wait()
            if 2 * len(late) < len(self.senders):
                passed = loop_time() - before
                self.waited |= {sender: self.waited.get(sender, 0.0) + passed for sender in late}

    def _without(self, index: int) -> list[str]:
        """Senders that are there and have not sent this part."""
        return [sender for sender in self.senders if self._counts[sender] <= index and sender not in self.failed]

    def used(self, sender: str) -> int:
        """The count of its parts that are in the averages: the first ones. Final when all averages are made."""
        return self._counts[sender]

    def _average(self, index: int) -> bytes:
        part = self.parts[index]
        if self.weights[self.me]:
            self._received[self.me] = {index: self._own.read(part.start, part.stop)}
        contributions = [
            ReceivedPart(sender, received.pop(index), self.weights[sender], self.spreads.get(sender, 0.0))
            for sender, received in self._received.items()
            if index in received
        ]
        self.empty |= not contributions
        average = average_part(self.codec, self._aggregation, contributions, part.elements, part.large)
        self.clipped.update(average.clipped)
        if average.products is not None:
            there = [self.senders.index(part.sender) for part in contributions]
            self.products[np.ix_(there, there)] += average.products
        self.rejected |= dict.fromkeys(average.huge, f"sent values beyond {LARGEST:.0e}")
        return average.encoded

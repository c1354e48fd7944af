"""Averages the parts that this peer is responsible for.

The members' parts are kept as they came, a byte for each element, until all members that are still there have sent the
same part. Then they are added up in one pass, in the order of the members, so that the same contributions give the same
bytes; and the average is encoded once, for all. It lies in the store, of which the answers are read: nothing of a round
stays here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from hivemind.proto import runtime_pb2

from tt_cli.swarm.codec import GradientCodec, MalformedPart
from tt_cli.swarm.encoded import EncodedBuffer
from tt_cli.swarm.layout import Part

AHEAD = 32  # parts that a sender may be ahead of the slowest: bounds what a reducer keeps
LARGEST = 1e18  # magnitude: beyond it no gradient is meant, and below it no weighted sum overflows


class Reducer:
    """parts: those of this peer. own: its gradient. weight: its samples. me: its peer id. keep: takes each average as
    it is made, its place in `parts` and its bytes.

    senders: all members that send, in their order, this peer among them. max_weight: the largest weight (samples) that
    a member may claim. failed: senders that are out, with the reason; what they sent before counts. rejected: senders
    some of whose numbers were left out, with the reason. seconds: spent on sums and on encoding them.
    """

    def __init__(
        self,
        codec: GradientCodec,
        parts: Sequence[Part],
        own: EncodedBuffer,
        weight: float,
        me: str,
        senders: Sequence[str],
        max_weight: float,
        keep: Callable[[int, bytes], None],
    ):
        self.codec, self.parts, self.senders = codec, parts, list(senders)
        self.max_weight = max_weight
        self._keep = keep
        self.failed: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.weights: dict[str, float] = {me: weight}
        self.made = 0  # averages
        self._own, self._me = own, me
        self._received: dict[str, dict[int, bytes]] = {sender: {} for sender in senders}
        self._counts = dict.fromkeys(senders, 0) | {me: len(parts)}
        self._changed = asyncio.Condition()
        self._ended = False
        self.seconds = 0.0

    async def take(self, sender: str, message: runtime_pb2.Tensor, weight: float) -> None:
        """The next part of one sender; returns when there is room for another.

        Raises MalformedPart, with nothing changed, for what must not enter an average.
        """
        index = self._counts[sender]
        if index >= len(self.parts):
            raise MalformedPart("more parts than it was asked for")
        if not math.isfinite(weight) or not 0.0 <= weight <= self.max_weight:
            raise MalformedPart(f"weight {weight} outside 0 to {self.max_weight:g}")
        if self.weights.setdefault(sender, weight) != weight:
            raise MalformedPart("a weight that changes between parts")
        part = self.parts[index]
        encoded = self.codec.read_part(message, part.elements, part.large)
        async with self._changed:
            if sender in self.failed:
                return
            self._received[sender][index] = encoded
            self._counts[sender] = index + 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: sender in self.failed or index < self.made + AHEAD)

    async def fail(self, sender: str, reason: str) -> None:
        """Nothing more comes from this sender: the others do not wait for it."""
        async with self._changed:
            if self._counts[sender] < len(self.parts):
                self.failed.setdefault(sender, reason)
            self._changed.notify_all()

    async def run(self) -> None:
        """Average all parts, one after the other."""
        try:
            for index in range(len(self.parts)):
                async with self._changed:
                    await self._changed.wait_for(partial(self._ready, index))
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

    def _ready(self, index: int) -> bool:
        return all(self._counts[sender] > index or sender in self.failed for sender in self.senders)

    def _average(self, index: int) -> bytes:
        contributions = {sender: self._received[sender].pop(index, None) for sender in self.senders}
        contributions[self._me] = self._own.read(self.parts[index].start, self.parts[index].stop)
        summed = self._sum(index, contributions)
        if not summed.abs().max() <= LARGEST:
            self._leave_out_the_huge(index, contributions)
            summed = self._sum(index, contributions)
        return self.codec.encode_part(summed, self.parts[index].large).buffer

    def _sum(self, index: int, contributions: Mapping[str, bytes | None]) -> torch.Tensor:
        """The mean over the samples of those who contributed; zeros when nobody has any."""
        part, total = self.parts[index], 0.0
        summed = torch.zeros(part.elements)
        for sender, encoded in contributions.items():
            weight = self.weights.get(sender, 0.0)
            if encoded is not None:
                self.codec.add(encoded, part.large, summed, weight)
                total += weight
        return summed.div_(total) if total > 0 else summed

    def _leave_out_the_huge(self, index: int, contributions: dict[str, bytes | None]) -> None:
        part = self.parts[index]
        for sender, encoded in contributions.items():
            if encoded is None:
                continue
            decoded = torch.empty(part.elements)
            self.codec.decode_into(encoded, part.large, decoded)
            if decoded.abs().max() > LARGEST:
                contributions[sender] = None
                self.rejected[sender] = f"sent values beyond {LARGEST:.0e}"

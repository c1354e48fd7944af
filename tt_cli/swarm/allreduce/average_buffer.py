"""The average of a round as it travelled, and the hashes by which members compare it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition, TensorPart

HASH_BYTES = 16
MISSING = bytes(HASH_BYTES)
KEPT_AVERAGES, WANTED_SECONDS = 2, 300.0


class AverageBuffer:
    """The newest average. Made before the averager's process forks; `open` says to what it belongs from then on.

    codec: that of the run's averages. buffer: the encoded average, which both processes see. shares, parts, hashes:
    those of the round's reducers, how it cut the average, and the hash of each part, MISSING where it is not there;
    known in the process that opened it. votes: signed ones for it, of those who stepped with it.
    """

    def __init__(self, layout: Partition, codec: GradientCodec):
        self.layout, self.codec = layout, codec.averages
        self.buffer = GradientBuffer(layout, self.codec)
        self.shares: tuple[int, ...] = ()
        self.parts: tuple[TensorPart, ...] = ()
        self.hashes: list[bytes] = []
        self.votes: tuple[bytes, ...] = ()

    def open(self, shares: tuple[int, ...]) -> list[bytes]:
        """Forget what is in it. Returns the hashes of what comes now. Raises ValueError as `Partition.parts`."""
        parts = self.layout.parts(shares)
        self.shares, self.parts, self.hashes, self.votes = shares, parts, [MISSING] * len(parts), ()
        return self.hashes

    def put(self, index: int, encoded: bytes, hashes: list[bytes]) -> None:
        """Keep the checked bytes of one part. hashes: those of its round. Raises LookupError after another `open`."""
        if self.hashes is not hashes:
            raise LookupError("the average is gone")
        self.buffer.write(self.parts[index].start, self.parts[index].stop, encoded)
        self.hashes[index] = part_hash(encoded)

    def get(self, index: int) -> bytes:
        return self.buffer.read(self.parts[index].start, self.parts[index].stop)

    def missing(self) -> list[int]:
        return [index for index, digest in enumerate(self.hashes) if digest == MISSING]

    @property
    def received(self) -> float:
        """The share of the elements that is there, 0 to 1."""
        return 1.0 - sum(self.parts[index].elements for index in self.missing()) / max(1, self.layout.size)


class KeptAverages:
    """Copies of the newest averages that led to a step, made only while somebody catches up: the store has the next."""

    def __init__(self, store: AverageBuffer, clock: Callable[[], float] = loop_time):
        self._store, self._clock, self._asked = store, clock, -math.inf
        self._newest: tuple[str, list[bytes]] = ("", [])
        self._kept: dict[str, AverageBuffer] = {}

    def committed(self, state_key: str, votes: tuple[bytes, ...] = ()) -> None:
        """The store holds the average with which members step from this state. votes: signed ones for it."""
        self._newest, self._store.votes = (state_key, self._store.hashes), votes
        if self._clock() < self._asked + WANTED_SECONDS:
            self._copy()
        else:
            self._kept.clear()

    def find(self, state_key: str) -> AverageBuffer | None:
        """The average with which members stepped from this state, if it is still here. More are kept from now on."""
        self._asked = self._clock()
        if state_key not in self._kept and state_key == self._newest[0]:
            self._copy()
        return self._kept.get(state_key)

    def _copy(self) -> None:
        key, hashes = self._newest
        if self._store.hashes is hashes:  # no other round has begun since
            self._kept[key] = average = AverageBuffer(self._store.layout, self._store.codec)
            average.buffer.load(self._store.buffer.dump())
            average.shares, average.parts, average.hashes = self._store.shares, self._store.parts, list(hashes)
            average.votes = self._store.votes
            for old in list(self._kept)[:-KEPT_AVERAGES]:
                del self._kept[old]


def part_hash(encoded: bytes) -> bytes:
    """The hash by which members compare a part (HASH_BYTES,); never MISSING."""
    return hashlib.sha256(encoded).digest()[:HASH_BYTES]

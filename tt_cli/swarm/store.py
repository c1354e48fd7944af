"""The average of a round as it travelled, and the hashes by which members compare it."""

from __future__ import annotations

import hashlib

from tt_cli.swarm.codec import GradientCodec
from tt_cli.swarm.encoded import EncodedBuffer
from tt_cli.swarm.layout import Layout, Part

HASH_BYTES = 16
MISSING = bytes(HASH_BYTES)


class AverageStore:
    """The newest average. Made before the averager's process forks; `open` says to what it belongs from then on.

    buffer: the encoded average, which both processes see. parts, hashes: how the round cut it, and the hash of each
    part, MISSING where it is not there; known in the process that opened it.
    """

    def __init__(self, layout: Layout, codec: GradientCodec):
        self.layout, self.codec = layout, codec
        self.buffer = EncodedBuffer(layout, codec)
        self.parts: tuple[Part, ...] = ()
        self.hashes: list[bytes] = []

    def open(self, parts: tuple[Part, ...]) -> None:
        """Forget what is in it."""
        self.parts = parts
        self.hashes = [MISSING] * len(parts)

    def put(self, index: int, encoded: bytes) -> None:
        """Keep the checked bytes of one part."""
        self.buffer.write(self.parts[index].start, self.parts[index].stop, encoded)
        self.hashes[index] = part_hash(encoded)

    def get(self, index: int) -> bytes:
        """The bytes of one part."""
        return self.buffer.read(self.parts[index].start, self.parts[index].stop)

    def missing(self) -> list[int]:
        """Parts that are not there."""
        return [index for index, found in enumerate(self.hashes) if found == MISSING]

    @property
    def received(self) -> float:
        """The share of the elements that is there, 0 to 1."""
        return 1.0 - sum(self.parts[index].elements for index in self.missing()) / max(1, self.layout.size)


def part_hash(encoded: bytes) -> bytes:
    """What members compare (HASH_BYTES,); never MISSING."""
    return hashlib.sha256(encoded).digest()[:HASH_BYTES]

"""The average of a round as it travelled: encoded bytes, one copy, shared by the two processes of a peer.

A member keeps the encoded average and not its numbers: a quarter of the memory, any part of it can be handed to
another member as it came, and its hash says whether two members hold the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tt_cli.swarm.codec import GradientCodec
from tt_cli.swarm.layout import PART_ELEMENTS, Layout, Part, offsets

HASH_BYTES = 16
MISSING = bytes(HASH_BYTES)
MAX_REDUCERS = 256
SLACK = 2048  # bytes that a part may take beyond its elements, in any codec


@dataclass(frozen=True)
class Cut:
    """How one round cut the buffer: its parts, and where the bytes of each lie (one more entry than parts)."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, codec: GradientCodec, reducers: int) -> Cut:
        """The cut for so many reducers."""
        parts = layout.parts(reducers)
        return cls(tuple(parts), tuple(offsets([codec.part_bytes(part.elements, part.large) for part in parts])))


class AverageStore:
    """Bytes of one average. Made before the averager's process forks; `open` says to what it belongs from then on.

    hashes: of each part, MISSING where it is not there. Only the process that opened it knows the cut and the hashes.
    """

    def __init__(self, layout: Layout, codec: GradientCodec):
        self.layout, self.codec = layout, codec
        parts = layout.size // PART_ELEMENTS + 2 * MAX_REDUCERS
        capacity = layout.size + (layout.size - layout.boundary) + layout.size // 64 + SLACK * parts
        self.bytes = torch.empty(capacity, dtype=torch.uint8).share_memory_()
        self._view = memoryview(self.bytes.numpy())
        self.cut = Cut((), (0,))
        self.hashes: list[bytes] = []

    def open(self, cut: Cut) -> None:
        """Forget what is in it."""
        if cut.offsets[-1] > len(self._view):
            raise ValueError(f"an average of {cut.offsets[-1]} bytes where {len(self._view)} are")
        self.cut = cut
        self.hashes = [MISSING] * len(cut.parts)

    def put(self, index: int, encoded: bytes) -> None:
        """Keep the checked bytes of one part."""
        self._view[self.cut.offsets[index] : self.cut.offsets[index + 1]] = encoded
        self.hashes[index] = part_hash(encoded)

    def get(self, index: int) -> memoryview:
        """The bytes of one part."""
        return self._view[self.cut.offsets[index] : self.cut.offsets[index + 1]]

    def missing(self) -> list[int]:
        """Parts that are not there."""
        return [index for index, found in enumerate(self.hashes) if found == MISSING]

    @property
    def received(self) -> float:
        """The share of the elements that is there, 0 to 1."""
        lost = sum(self.cut.parts[index].elements for index in self.missing())
        return 1.0 - lost / self.layout.size

    def decode(self, cut: Cut, flat: torch.Tensor) -> None:
        """Fill `flat` (layout.size,) with the whole average, in any process; the gap between tensors stays as it is."""
        for part, start, stop in zip(cut.parts, cut.offsets, cut.offsets[1:], strict=False):
            self.codec.decode_into(self._view[start:stop], part.large, flat[part.start : part.stop])


def part_hash(encoded: bytes | memoryview) -> bytes:
    """What members compare (HASH_BYTES,); never MISSING."""
    return hashlib.sha256(encoded).digest()[:HASH_BYTES]


def average_digest(hashes: Sequence[bytes]) -> str:
    """Hex digest of a whole average."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()

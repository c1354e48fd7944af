"""Sparse messages whose values have four bits instead of two, to measure what two bits lose; no run uses them.

The form is that of tt_cli/swarm/compression/sparse.py but for the codes: a sign, and of eight equal steps up to the
largest magnitude of a chunk the one in whose middle the value counts.
"""

from __future__ import annotations

import numpy as np
import torch

from tt_cli.swarm.compression import sparse
from tt_cli.swarm.compression.codec import SparseMessage
from tt_cli.swarm.compression.linear8 import SMALLEST, flat, widened

STEPS = 8
VALUES = np.outer(np.arange(1, 2 * STEPS, 2), (1, -1)).reshape(-1).astype(np.float32)  # over the scale, a 16th


class FourBits(SparseMessage):
    """The largest `kept` of each chunk, 16 bits each."""

    def room(self, elements: int) -> int:
        return sparse.chunks_in(elements) * 2 * self.kept

    def encode(self, tensor: torch.Tensor) -> bytes:
        _, places, _ = sparse._read(sparse.encode(tensor, self.kept), self.kept)
        values = np.take_along_axis(sparse.in_chunks(tensor), places, axis=1)
        scales = sparse._narrowed(np.abs(values).max(axis=1) / (2 * STEPS))
        steps = np.abs(values) / np.maximum(2 * widened(scales), SMALLEST)[:, None]
        codes = np.signbit(values) | np.minimum(steps, STEPS - 1).astype(np.uint16) << 1
        return scales.tobytes() + (places.astype(np.uint16) | codes << 12).tobytes()

    def check(self, buffer: bytes, elements: int) -> None:
        """Nobody sends them."""

    def decode_into(self, buffer: bytes, out: torch.Tensor) -> None:
        count = sparse.chunks_in(out.numel())
        scales, both = np.frombuffer(buffer, "<u2", count), np.frombuffer(buffer, "<u2", offset=2 * count)
        both = both.reshape(count, self.kept)
        chunks = np.zeros((count, sparse.CHUNK), np.float32)
        np.put_along_axis(chunks, (both & 0xFFF).astype(np.int64), VALUES[both >> 12] * widened(scales)[:, None], 1)
        flat(out).copy_(torch.from_numpy(chunks.reshape(-1)[: out.numel()]))

    def add_decoded(self, buffer: bytes, accumulator: torch.Tensor, weight: float) -> None:
        self.decode_into(buffer, decoded := torch.empty_like(accumulator))
        accumulator.add_(decoded, alpha=weight)

    def largest(self, scales: memoryview, codes: memoryview) -> np.ndarray:
        return VALUES[-2] * widened(np.frombuffer(scales, "<u2"))

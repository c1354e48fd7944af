"""The average of sparse messages: a bit for each element that says whether it has a value, and values in four bits.

- Form (docs/protocol.md, "How a part is written"): of each chunk of 4,096 elements its scale and the bits, then of each
  chunk the values of those elements, two in a byte: a sign and one of eight magnitudes. These are the scale's halves,
  or its products with roots of a half: what one of many members sent may be small beside what many sent.
- 2,562 bytes a chunk at most, whatever the number of members: 0.63 an element.
- The bits say how long the rest is. The same bytes on every CPU, as in `linear8.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from tt_cli.swarm.compression.linear8 import SMALLEST, flat, widened
from tt_cli.swarm.compression.sparse import AT_ONCE, CHUNK, check_scales, check_sizes, chunks_in, in_chunks

HEAD_BYTES = 2 + CHUNK // 8  # of a chunk
MOST_CODES = CHUNK // 2
COARSE = np.ldexp(np.float32(1), np.arange(-7, 1))  # magnitudes, over the scale of a chunk
FINE = COARSE[4:].repeat(2) * np.tile(np.array([0.70710677, 1], np.float32), 4)
FEW = 8  # where an eighth of what a chunk has would have no value, its magnitudes are the coarse ones
SIGN = np.uint32(0x8000)  # of a scale: then magnitudes are coarse
COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)  # of set bits
VALUES = np.concatenate((FINE, -FINE, COARSE, -COARSE))  # by the sign of the scale and the four bits


def encode(tensor: torch.Tensor) -> bytes:
    """The bytes of an fp32 CPU tensor of any shape. Raises ValueError where it is not finite, or above 2^126."""
    chunks = in_chunks(tensor)
    pieces = [_encoded(chunks[start : start + AT_ONCE]) for start in range(0, len(chunks), AT_ONCE)]
    return b"".join(heads.tobytes() for heads, _ in pieces) + b"".join(codes.tobytes() for _, codes in pieces)


def _encoded(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heads (chunks, HEAD_BYTES) and codes of a few chunks."""
    sizes = np.abs(chunks)
    largest = sizes.max(axis=1)
    check_sizes(largest)
    bits = (largest.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)  # rounded up, as in linear8
    bits[widened(bits) < SMALLEST] = 0
    scales = widened(bits)
    there = (sizes >= (scales * _least(FINE))[:, None]) & (scales > 0)[:, None]
    coarse = FEW * np.count_nonzero(there, axis=1) < (FEW - 1) * np.count_nonzero(chunks, axis=1)
    coarse &= bits > 0
    there[coarse] = sizes[coarse] >= (scales[coarse] * _least(COARSE))[:, None]
    counts, values = np.count_nonzero(there, axis=1), chunks[there]
    shares, rough = np.abs(values) / np.repeat(scales, counts), np.repeat(coarse, counts)
    codes = np.signbit(values).view(np.uint8) << 3
    for fine_bound, coarse_bound in zip(_between(FINE), _between(COARSE), strict=True):
        codes += shares >= np.where(rough, coarse_bound, fine_bound)
    bits |= coarse * SIGN
    halves = np.zeros(int(_even(counts).sum()), np.uint8)
    halves[_slots(counts)] = codes
    heads = np.empty((len(chunks), HEAD_BYTES), np.uint8)
    heads[:, :2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    heads[:, 2:] = np.packbits(there, axis=1, bitorder="little")
    return heads, halves[0::2] | halves[1::2] << 4


def _least(levels: np.ndarray) -> np.float32:
    """The share of the scale from which on an element has a value."""
    return np.float32(levels[0] * np.float32(0.5))


def _between(levels: np.ndarray) -> np.ndarray:
    return (levels[1:] + levels[:-1]) * np.float32(0.5)


def _even(counts: np.ndarray) -> np.ndarray:
    return counts + counts % 2


def _slots(counts: np.ndarray) -> np.ndarray:
    """The places of values among half bytes, in which each chunk begins a byte."""
    before = np.cumsum(counts % 2) - counts % 2
    return np.arange(int(counts.sum())) + np.repeat(before, counts)


def _heads(heads: memoryview | bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upper halves of the scales and whether magnitudes are coarse (chunks,), and bits (chunks, CHUNK // 8)."""
    rows = np.frombuffer(heads, np.uint8).reshape(-1, HEAD_BYTES)
    scales = rows[:, :2].copy().view("<u2")[:, 0]
    return scales & ~SIGN.astype(np.uint16), scales >= SIGN, rows[:, 2:]


def _counts(bits: np.ndarray) -> np.ndarray:
    """The values of each chunk."""
    return COUNTS[bits].sum(axis=1, dtype=np.int64)


def code_bytes(heads: memoryview) -> int:
    """Of all chunks with these heads."""
    return int(_even(_counts(_heads(heads)[2])).sum()) // 2


def check(buffer: bytes, elements: int) -> None:
    """Raise ValueError for bytes, of the right length, that `encode` cannot have made."""
    begin = chunks_in(elements) * HEAD_BYTES
    scales, coarse, bits = _heads(buffer[:begin])
    counts = _counts(bits)
    check_scales(scales)
    if ((scales > 0) != (counts > 0)).any() or (coarse & (scales == 0)).any():
        raise ValueError("a scale without values, or values without a scale")
    last = np.cumsum(_even(counts))[counts % 2 > 0] // 2 - 1
    if (np.frombuffer(buffer, np.uint8, offset=begin)[last] >> 4).any():
        raise ValueError("more values than bits say")


def decode_into(buffer: bytes, out: torch.Tensor) -> None:
    """Fill `out`, a contiguous fp32 CPU tensor of any shape, from checked bytes."""
    begin = chunks_in(out.numel()) * HEAD_BYTES
    scales, coarse, bits = _heads(buffer[:begin])
    counts, codes = _counts(bits), np.frombuffer(buffer, np.uint8, offset=begin)
    halves = np.stack((codes & 0xF, codes >> 4), axis=1).reshape(-1)[_slots(counts)]
    values = VALUES[halves + 16 * np.repeat(coarse, counts)] * np.repeat(widened(scales), counts)
    there = np.unpackbits(bits.reshape(-1), bitorder="little").view(bool)[: out.numel()]
    flat(out).zero_().numpy()[there] = values[: np.count_nonzero(there)]


def root_mean_squares(heads: memoryview, codes: memoryview) -> np.ndarray:
    """Of each chunk, at most."""
    scales, _, bits = _heads(heads)
    return widened(scales) * np.sqrt(_counts(bits) / CHUNK)


def spread_out(heads: memoryview, codes: memoryview) -> bytes:
    """The codes of each chunk at a place of its own."""
    rows = np.zeros((len(heads) // HEAD_BYTES, MOST_CODES), np.uint8)
    rows[_taken(heads)] = np.frombuffer(codes, np.uint8)
    return rows.tobytes()


def drawn_together(heads: memoryview, codes: memoryview) -> bytes:
    """The codes that `spread_out` was given."""
    return np.frombuffer(codes, np.uint8).reshape(-1, MOST_CODES)[_taken(heads)].tobytes()


def _taken(heads: memoryview) -> np.ndarray:
    """True for the bytes (chunks, MOST_CODES) that have values."""
    return np.arange(MOST_CODES) < _even(_counts(_heads(heads)[2]))[:, None] // 2

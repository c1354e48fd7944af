"""Sparse messages of local steps: of each chunk of 4,096 elements the largest, in two bits.

What a message leaves out its sender keeps for the next one (error feedback). SparseLoCo (arXiv:2508.15706).

- Form (docs/protocol.md, "How a part is written"): the scales, then of each chunk the places of what is kept, rising,
  in 12 bits, and their codes, a sign and whether the magnitude is two scales instead of one.
- As many elements of every chunk, so the count of elements says how long a message is, and any chunk can be cut out.
- The same bytes on every CPU: places are chosen by the bits of magnitudes, the lower place of two alike; sums are of
  float64 in a fixed order, and everything else is single products and quotients.
"""

from __future__ import annotations

import numpy as np
import torch

from tt_cli.swarm.compression.linear8 import LARGEST, SMALLEST, check_tensor, check_weight, flat, widened

CHUNK = 4096
LOWEST, HIGHEST = (int(scale.view(np.uint32)) >> 16 for scale in (SMALLEST, LARGEST))
BEYOND = 1.2  # times the mean magnitude of what is kept: from there on it counts as two scales
AT_ONCE = 64  # chunks that stay in the cache


def chunks_in(elements: int) -> int:
    return -(-elements // CHUNK)


def code_bytes(kept: int) -> int:
    """Of a chunk, behind its scale."""
    return kept * 14 // 8


def encode(tensor: torch.Tensor, kept: int) -> bytes:
    """The bytes of an fp32 CPU tensor of any shape. Raises ValueError where it is not finite, or above 2^126."""
    chunks = in_chunks(tensor)
    pieces = [_largest(chunks[start : start + AT_ONCE], kept) for start in range(0, len(chunks), AT_ONCE)]
    places = np.concatenate(pieces).reshape(-1, kept)
    values = chunks.reshape(-1)[places + CHUNK * np.arange(len(chunks))[:, None]]
    sizes = np.abs(values).astype(np.float64)
    check_sizes(sizes)
    whole = _folded(sizes)
    large = sizes > BEYOND / kept * whole[:, None]
    count = np.count_nonzero(large, axis=1)
    scales = _narrowed((whole + _folded(sizes * large)) / (kept + 3 * count))  # the least squares
    bits = np.signbit(values) | large.view(np.uint8) << 1
    first, second = places[:, 0::2], places[:, 1::2]
    triples = np.stack((first, first >> 8 | second << 4, second >> 4), axis=2).astype(np.uint8)
    quads = bits[:, 0::4] | bits[:, 1::4] << 2 | bits[:, 2::4] << 4 | bits[:, 3::4] << 6
    return scales.tobytes() + np.hstack((triples.reshape(len(chunks), -1), quads)).tobytes()


def in_chunks(tensor: torch.Tensor) -> np.ndarray:
    """An fp32 CPU tensor of any shape as (chunks, CHUNK), the last one filled up with zeros."""
    check_tensor(tensor)
    values = tensor.detach().reshape(-1)
    if missing := -values.numel() % CHUNK:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.numpy().reshape(-1, CHUNK)


def check_sizes(largest: np.ndarray) -> None:
    """Raise ValueError for magnitudes that have no code."""
    if not (largest <= LARGEST).all():
        raise ValueError("values that are not finite, or beyond 2^126")


def _largest(chunks: np.ndarray, kept: int) -> np.ndarray:
    """The places of the largest magnitudes in each of a few chunks, in one row; of equal ones the first."""
    keys = chunks.view(np.int32) & np.int32(0x7FFFFFFF)
    bound = np.partition(keys, CHUNK - kept, axis=1)[:, CHUNK - kept, None]
    chosen = keys >= bound
    if np.count_nonzero(chosen) > len(keys) * kept:
        for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > kept):
            equal = np.flatnonzero(keys[row] == bound[row])
            chosen[row, equal[kept - np.count_nonzero(keys[row] > bound[row]) :]] = False
    eights = chosen.view(np.uint64).reshape(-1)  # most have none
    some = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[some].view(bool))
    return (some[within >> 3] << 3 | within & 7).astype(np.uint16) & np.uint16(CHUNK - 1)


def _folded(terms: np.ndarray) -> np.ndarray:
    """The sum of each row, by halves."""
    columns, width = terms.T.copy(), terms.shape[1]
    while width > 1:
        half = -(-width // 2)
        columns[: width - half] += columns[half:width]
        width = half
    return columns[0]


def _narrowed(scales: np.ndarray) -> np.ndarray:
    """The upper 16 bits of fp32 scales, rounded to the nearest; 0 for those that are too small."""
    bits = (scales.astype(np.float32).view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    return np.where(scales < SMALLEST, np.uint32(0), bits).astype("<u2")


def check_scales(bits: np.ndarray) -> None:
    """Raise ValueError for scales that no encoder writes; 0 is that of a chunk of zeros."""
    if bool(((bits > HIGHEST) | (bits < LOWEST) & (bits > 0)).any()):
        raise ValueError("scales that are not finite, negative, or out of range")


def check(buffer: bytes, kept: int) -> None:
    """Raise ValueError for bytes, of the right length, that `encode` cannot have made."""
    scales, places, _ = _read(buffer, kept)
    check_scales(scales)
    if not (places[:, 1:] > places[:, :-1]).all():
        raise ValueError("places that do not rise")


def _read(buffer: bytes, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales (chunks,), places and 2-bit codes (chunks, kept)."""
    count = len(buffer) // (2 + code_bytes(kept))
    scales = np.frombuffer(buffer, "<u2", count)
    codes = np.frombuffer(buffer, np.uint8, offset=2 * count).reshape(count, code_bytes(kept))
    triples = codes[:, : kept * 3 // 2].reshape(count, kept // 2, 3).astype(np.int32)
    low, middle, high = triples[:, :, 0], triples[:, :, 1], triples[:, :, 2]
    places = np.stack((low | (middle & 0xF) << 8, middle >> 4 | high << 4), axis=2).reshape(count, kept)
    quads = codes[:, kept * 3 // 2 :, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    return scales, places, (quads & 3).reshape(count, kept)


def _decoded(buffer: bytes, elements: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of values among so many elements, and these, fp32."""
    scales, places, codes = _read(buffer, kept)
    values = np.array([1, -1, 2, -2], np.float32)[codes] * widened(scales)[:, None]
    places = (places + CHUNK * np.arange(len(scales))[:, None]).reshape(-1)
    within = slice(None) if elements == CHUNK * len(scales) else places < elements
    return places[within], values.reshape(-1)[within]


def decode_into(buffer: bytes, out: torch.Tensor, kept: int) -> None:
    """Fill `out`, a contiguous fp32 CPU tensor of any shape, from checked bytes."""
    places, values = _decoded(buffer, out.numel(), kept)
    numbers = flat(out).zero_().numpy()
    numbers[places] = values


def add_decoded(buffer: bytes, accumulator: torch.Tensor, kept: int, weight: float) -> None:
    """accumulator += decoded * weight where a value is; each product and sum is rounded by itself."""
    check_weight(weight)
    places, values = _decoded(buffer, accumulator.numel(), kept)
    numbers = flat(accumulator).numpy()
    numbers[places] += values * np.float32(weight)

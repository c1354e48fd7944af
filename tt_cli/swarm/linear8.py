"""Gradients in 8 bits: one scale for each block of 256 elements, evenly spaced values within it.

hivemind's own 8-bit codecs are made for any tensor and are slow: theirs look values up in tables. A gradient's block is
near enough to normal that evenly spaced values lose less, and they need no table.

- Form (docs/protocol.md, "How a part is written"): the scales, then one signed byte for each element. A scale is the
  largest magnitude of its block over 127, rounded up to the upper 16 bits of an fp32 number.
- The same bytes on every CPU: only exact maxima, single IEEE divisions and products, and rounding to nearest even;
  blocks so small that a CPU might flush their products to zero are zero.
- Whatever is not finite shows in the blocks' maxima, and what a message decodes to is finite when its scales are: no
  further pass over the elements is needed.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # elements
PIECE = 1024  # blocks that are scaled at a time: 1 MiB of fp32 stays in the cache
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # blocks below are zero: no product or scale of the others is denormal


def encode(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous fp32 CPU tensor. Raises ValueError where it is not finite, or above 2^126."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} on {tensor.device} instead of float32 on the CPU")
    flat = tensor.detach().reshape(-1)
    elements, whole = flat.numel(), flat.numel() // BLOCK
    blocks = flat[: whole * BLOCK].view(whole, BLOCK)
    rest = flat[whole * BLOCK :]
    largest = np.zeros(_blocks(elements), np.float32)
    if whole:
        torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_(), out=torch.from_numpy(largest[:whole]))
    if rest.numel():
        largest[whole] = max(rest.amax(), -rest.amin())  # both NaN when one is
    if elements and not largest.max() <= LARGEST:
        raise ValueError("values that are not finite, or beyond 2^126")

    buffer = np.empty(encoded_bytes(elements), np.uint8)
    upper = _scales(largest)
    buffer[: 2 * len(upper)] = upper.view(np.uint8)
    factors = np.divide(np.float32(1), _widened(upper), out=np.zeros_like(largest), where=upper != 0)
    coded = torch.from_numpy(buffer[2 * len(upper) :].view(np.int8))
    scaled = torch.empty(min(whole, PIECE), BLOCK)
    columns = torch.from_numpy(factors[:whole]).unsqueeze(1)
    targets = coded[: whole * BLOCK].view(whole, BLOCK)
    for start in range(0, whole, PIECE):
        piece = scaled[: min(PIECE, whole - start)]
        torch.mul(blocks[start : start + PIECE], columns[start : start + PIECE], out=piece)
        targets[start : start + PIECE].copy_(piece.round_())
    if rest.numel():
        coded[whole * BLOCK :].copy_((rest * float(factors[whole])).round_())
    return buffer.tobytes()


def decode(buffer: bytes, elements: int) -> torch.Tensor:
    """An fp32 tensor (elements,), finite. Raises ValueError for bytes that `encode` cannot have made."""
    blocks, whole = _blocks(elements), elements // BLOCK
    if len(buffer) != encoded_bytes(elements):
        raise ValueError(f"{len(buffer)} bytes instead of {encoded_bytes(elements)} for {elements} elements")
    upper = np.frombuffer(buffer, "<u2", count=blocks)
    bounds = _scales(np.array([SMALLEST, LARGEST], np.float32))
    # as whole numbers: NaN, infinity and everything negative are above the upper bound
    if blocks and (upper.max() > bounds[1] or ((upper < bounds[0]) & (upper != 0)).any()):
        raise ValueError("scales that are not finite, negative, or out of range")
    scales = torch.from_numpy(_widened(upper))
    coded = np.frombuffer(buffer, np.int8, offset=2 * blocks)
    decoded = np.empty(elements, np.float32)
    tensor = torch.from_numpy(decoded)
    columns = scales[:whole].unsqueeze(1)
    values = tensor[: whole * BLOCK].view(whole, BLOCK)
    for start in range(0, whole, PIECE):
        here = slice(start * BLOCK, min(start + PIECE, whole) * BLOCK)
        decoded[here] = coded[here]
        values[start : start + PIECE].mul_(columns[start : start + PIECE])
    if elements > whole * BLOCK:
        np.multiply(coded[whole * BLOCK :], scales[whole].numpy(), out=decoded[whole * BLOCK :])
    return tensor


def encoded_bytes(elements: int) -> int:
    """The length of what `encode` makes of so many elements."""
    return elements + 2 * _blocks(elements)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _scales(largest: np.ndarray) -> np.ndarray:
    """The upper 16 bits of fp32 scales for blocks of these largest magnitudes; rounded up, so that 127 is enough."""
    bits = (largest / LEVELS).view(np.uint32)
    return np.where(largest < SMALLEST, 0, (bits + 0xFFFF) >> 16).astype("<u2")


def _widened(upper: np.ndarray) -> np.ndarray:
    return (upper.astype(np.uint32) << 16).view(np.float32)

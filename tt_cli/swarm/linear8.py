"""Gradients in 8 bits: one scale for each block of 256 elements, evenly spaced values within it.

hivemind's own 8-bit codecs are made for any tensor and are slow: theirs look values up in tables. A gradient's block is
near enough to normal that evenly spaced values lose less, and they need no table.

- Form (docs/protocol.md, "How a part is written"): the scales, then one signed byte for each element. A scale is the
  largest magnitude of its block over 127, rounded up to the upper 16 bits of an fp32 number.
- The same bytes on every CPU: only exact maxima, single IEEE divisions and products, and rounding to nearest even;
  no scale is so small that it mattered whether a CPU flushes denormal numbers to zero.
- Whatever is not finite shows in the blocks' maxima, and what a message decodes to is finite when its scales are: no
  further pass over the elements is needed.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # elements
PIECE = 2048  # blocks that are coded at a time: what memory is used besides stays within 2 MiB
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # of a block counts as much; products and scales are then never denormal


def encode(tensor: torch.Tensor) -> bytes:
    """The bytes of an fp32 CPU tensor. Raises ValueError where it is not finite, or above 2^126."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} on {tensor.device} instead of float32 on the CPU")
    flat = tensor.detach().reshape(-1)
    elements, count = flat.numel(), _blocks(flat.numel())
    buffer = np.empty(encoded_bytes(elements), np.uint8)
    upper = buffer[: 2 * count].view("<u2")
    coded = torch.from_numpy(buffer[2 * count :].view(np.int8))
    for start in range(0, elements // BLOCK, PIECE):
        stop = min(start + PIECE, elements // BLOCK)
        here = slice(start * BLOCK, stop * BLOCK)
        _encode(flat[here].view(-1, BLOCK), upper[start:stop], coded[here].view(-1, BLOCK))
    if rest := elements % BLOCK:
        _encode(flat[-rest:].view(1, rest), upper[-1:], coded[-rest:].view(1, rest))
    return buffer.tobytes()


def _encode(blocks: torch.Tensor, upper: np.ndarray, coded: torch.Tensor) -> None:
    """Fill `upper` (blocks,) and `coded` (blocks, elements) for fp32 `blocks` (blocks, elements)."""
    largest = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_()).numpy()
    if not largest.max() <= LARGEST:  # both are NaN where one element is
        raise ValueError("values that are not finite, or beyond 2^126")
    bits = _scale_bits(largest)
    upper[:] = bits
    scales = _widened(bits)
    products = blocks * torch.from_numpy(np.divide(np.float32(1), scales, out=scales)).unsqueeze(1)
    coded.copy_(products.round_())


def decode(buffer: bytes, elements: int) -> torch.Tensor:
    """An fp32 tensor (elements,), finite. Raises ValueError for bytes that `encode` cannot have made."""
    if len(buffer) != encoded_bytes(elements):
        raise ValueError(f"{len(buffer)} bytes instead of {encoded_bytes(elements)} for {elements} elements")
    count, whole = _blocks(elements), elements // BLOCK
    upper = np.frombuffer(buffer, "<u2", count=count)
    # as whole numbers: NaN, infinity and everything negative are above the bound
    if count and (upper.min() < LOWEST or upper.max() > HIGHEST):
        raise ValueError("scales that are not finite, negative, or out of range")
    scales = _widened(upper.astype(np.uint32))
    columns = torch.from_numpy(scales).unsqueeze(1)
    coded = np.frombuffer(buffer, np.int8, offset=2 * count)
    decoded = np.empty(elements, np.float32)
    tensor = torch.from_numpy(decoded)
    for start in range(0, whole, PIECE):
        stop = min(start + PIECE, whole)
        here = slice(start * BLOCK, stop * BLOCK)
        decoded[here] = coded[here]
        tensor[here].view(-1, BLOCK).mul_(columns[start:stop])
    if rest := elements % BLOCK:
        np.multiply(coded[-rest:], scales[-1], out=decoded[-rest:])
    return tensor


def encoded_bytes(elements: int) -> int:
    """The length of what `encode` makes of so many elements."""
    return elements + 2 * _blocks(elements)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _scale_bits(largest: np.ndarray) -> np.ndarray:
    """The upper 16 bits of fp32 scales for blocks of these largest magnitudes, which are overwritten.

    Rounded up, so that no element is beyond 127 scales.
    """
    np.maximum(largest, SMALLEST, out=largest)
    bits: np.ndarray = np.divide(largest, LEVELS, out=largest).view(np.uint32)
    bits += np.uint32(0xFFFF)
    bits >>= np.uint32(16)
    return bits


def _widened(bits: np.ndarray) -> np.ndarray:
    """The fp32 scales of upper halves, uint32, which are overwritten."""
    bits <<= np.uint32(16)
    return bits.view(np.float32)


LOWEST, HIGHEST = (int(bits) for bits in _scale_bits(np.array([SMALLEST, LARGEST], np.float32)))

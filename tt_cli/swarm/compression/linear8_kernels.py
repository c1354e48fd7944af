"""linear8's arithmetic: its constants, what the kernels must do, and how torch and numpy do it on every machine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

BLOCK = 256  # elements
PIECE = 2048  # blocks that are coded at a time: what memory is used besides stays within 2 MiB
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # of a block counts as much; products and scales are then never denormal


class Linear8Kernels(Protocol):
    """The arithmetic on flat contiguous fp32 CPU tensors (n,) and uint8 arrays (encoded_bytes(n),), both checked."""

    def encode(self, values: torch.Tensor, out: np.ndarray) -> bool:
        """Fill `out`. False when values are not finite or beyond `LARGEST`; `out` is undefined then."""

    def decode(self, coded: np.ndarray, out: torch.Tensor) -> None:
        """out = byte * scale."""

    def add(self, coded: np.ndarray, accumulator: torch.Tensor, weight: np.float32) -> None:
        """accumulator = accumulator + (byte * scale) * weight."""


class PortableLinear8:
    """`Linear8Kernels` with torch and numpy, for every machine."""

    def encode(self, values: torch.Tensor, out: np.ndarray) -> bool:
        elements, count = values.numel(), blocks_in(values.numel())
        upper = out[: 2 * count].view("<u2")
        coded = torch.from_numpy(out[2 * count :].view(np.int8))
        for here, blocks in _pieces(elements):
            rows = blocks.stop - blocks.start
            if not _encode(values[here].view(rows, -1), upper[blocks], coded[here].view(rows, -1)):
                return False
        return True

    def decode(self, coded: np.ndarray, out: torch.Tensor) -> None:
        scales, codes = _parted(coded, out.numel())
        for here, blocks in _pieces(out.numel()):
            _decode(codes[here], scales[blocks], out[here])

    def add(self, coded: np.ndarray, accumulator: torch.Tensor, weight: np.float32) -> None:
        scales, codes = _parted(coded, accumulator.numel())
        work = torch.empty(min(PIECE * BLOCK, accumulator.numel()), dtype=torch.float32)
        for here, blocks in _pieces(accumulator.numel()):
            decoded = work[: here.stop - here.start]
            _decode(codes[here], scales[blocks], decoded)
            accumulator[here].add_(decoded.mul_(float(weight)))


def blocks_in(elements: int) -> int:
    return -(-elements // BLOCK)


def _pieces(elements: int) -> list[tuple[slice, slice]]:
    """Elements and their blocks, some whole blocks at a time; the last, shorter block by itself."""
    whole = elements // BLOCK
    pieces = []
    for start in range(0, whole, PIECE):
        stop = min(start + PIECE, whole)
        pieces.append((slice(start * BLOCK, stop * BLOCK), slice(start, stop)))
    if elements % BLOCK:
        pieces.append((slice(whole * BLOCK, elements), slice(whole, whole + 1)))
    return pieces


def _parted(coded: np.ndarray, elements: int) -> tuple[torch.Tensor, np.ndarray]:
    """Scales, fp32 (blocks,), and signed bytes (elements,)."""
    count = blocks_in(elements)
    scales = _widened(coded[: 2 * count].view("<u2").astype(np.uint32))
    return torch.from_numpy(scales), coded[2 * count :].view(np.int8)


def _encode(blocks: torch.Tensor, upper: np.ndarray, coded: torch.Tensor) -> bool:
    """Fill `upper` (blocks,) and `coded` (blocks, elements) for fp32 `blocks` (blocks, elements)."""
    largest = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_()).numpy()
    if not largest.max() <= LARGEST:  # both are NaN where one element is
        return False
    bits = _scale_bits(largest)
    upper[:] = bits
    scales = _widened(bits)
    products = blocks * torch.from_numpy(np.divide(np.float32(1), scales, out=scales)).unsqueeze(1)
    coded.copy_(products.round_())
    return True


def _decode(codes: np.ndarray, scales: torch.Tensor, out: torch.Tensor) -> None:
    """out (elements,) = codes (elements,) times the scales (blocks,) of equal blocks."""
    out.numpy()[:] = codes
    out.view(len(scales), -1).mul_(scales.unsqueeze(1))


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

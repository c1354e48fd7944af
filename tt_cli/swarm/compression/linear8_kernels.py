"""linear8's arithmetic: its constants, what the kernels must do, and how torch and numpy do it on every machine."""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # elements
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # of a block counts as much; products and scales are then never denormal


class PortableLinear8:
    """The arithmetic with torch and numpy, for every machine, on what was checked before.

    Flat contiguous fp32 CPU tensors (n,) and uint8 arrays (encoded_bytes(n),).
    """

    def encode(self, values: torch.Tensor, out: np.ndarray) -> bool:
        """Fill `out`. False when values are not finite or beyond `LARGEST`; `out` is undefined then."""
        elements, count = values.numel(), blocks_in(values.numel())
        if elements % BLOCK:
            values = torch.nn.functional.pad(values, (0, count * BLOCK - elements))
        blocks = values.view(count, BLOCK)
        largest = torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_()).numpy()
        if not (largest <= LARGEST).all():  # both are NaN where one element is
            return False
        bits = _scale_bits(largest)
        out[: 2 * count].view("<u2")[:] = bits
        products = blocks * torch.from_numpy(np.float32(1) / _widened(bits)).unsqueeze(1)
        torch.from_numpy(out[2 * count :].view(np.int8)).copy_(products.round_().view(-1)[:elements])
        return True

    def decode(self, coded: np.ndarray, out: torch.Tensor) -> None:
        """out = byte * scale."""
        whole, count = out.numel() // BLOCK, blocks_in(out.numel())
        scales = torch.from_numpy(_widened(coded[: 2 * count].view("<u2").astype(np.uint32)))
        out.numpy()[:] = coded[2 * count :].view(np.int8)
        out[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole].unsqueeze(1))
        out[whole * BLOCK :].mul_(scales[whole:])

    def add(self, coded: np.ndarray, accumulator: torch.Tensor, weight: np.float32) -> None:
        """accumulator = accumulator + (byte * scale) * weight."""
        decoded = torch.empty_like(accumulator)
        self.decode(coded, decoded)
        accumulator.add_(decoded.mul_(float(weight)))


def blocks_in(elements: int) -> int:
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

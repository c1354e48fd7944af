"""Gradients in 8 bits: one scale for each block of 256 elements, evenly spaced values within it.

hivemind's own 8-bit codecs look values up in tables. A gradient's block is near enough to normal that evenly spaced
values lose less, and need no table.

- Form (docs/protocol.md, "How a part is written"): the scales, then one signed byte for each element. A scale is the
  largest magnitude of its block over 127, rounded up to the upper 16 bits of an fp32 number.
- The same bytes on every CPU: only exact maxima, single IEEE divisions, products and sums, and rounding to nearest
  even; no scale is so small that it mattered whether a CPU flushes denormal numbers to zero.
- Whatever is not finite shows in the blocks' maxima, and what is decoded is finite when its scales are.
- Two implementations give the same bytes: `PortableLinear8` and `linear8_numba.py`; see `tt_cli/kernel_choice.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from tt_cli.kernel_choice import Implementation, choose

Buffer = bytes | bytearray | memoryview
BLOCK = 256  # elements
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # of a block counts as much; products and scales are then never denormal


def encode(tensor: torch.Tensor) -> bytes:
    """The bytes of an fp32 CPU tensor of any shape. Raises ValueError where it is not finite, or above 2^126."""
    check_tensor(tensor)
    out = np.empty(encoded_bytes(tensor.numel()), np.uint8)
    if not implementation().kernels.encode(tensor.detach().reshape(-1), out):
        raise ValueError("values that are not finite, or beyond 2^126")
    return out.tobytes()


def decode_into(buffer: Buffer, out: torch.Tensor) -> None:
    """Fill `out`, a contiguous fp32 CPU tensor of any shape, with finite numbers.

    Raises ValueError for bytes that `encode` cannot have made of so many elements; `out` is unchanged then.
    """
    implementation().kernels.decode(check(buffer, out.numel()), flat(out))


def add_decoded(buffer: Buffer, accumulator: torch.Tensor, weight: float) -> None:
    """accumulator += decoded * weight; accumulator: contiguous fp32 on the CPU, any shape.

    Three fp32 operations on each element, each rounded by itself; may overflow. Raises ValueError for a weight that
    is negative or not finite, and as `decode_into`, before the accumulator is changed.
    """
    check_weight(weight)
    implementation().kernels.add(check(buffer, accumulator.numel()), flat(accumulator), np.float32(weight))


def check(buffer: Buffer, elements: int) -> np.ndarray:
    """The bytes as uint8 (encoded_bytes(elements),). Raises ValueError for what `encode` cannot have made."""
    coded = np.frombuffer(buffer, np.uint8)
    if len(coded) != encoded_bytes(elements):
        raise ValueError(f"{len(coded)} bytes instead of {encoded_bytes(elements)} for {elements} elements")
    upper = coded[: 2 * blocks_in(elements)].view("<u2")
    # as whole numbers: NaN, infinity and everything negative are above the bound
    if elements and (upper.min() < LOWEST or upper.max() > HIGHEST):
        raise ValueError("scales that are not finite, negative, or out of range")
    return coded


def encoded_bytes(elements: int) -> int:
    """The length of what `encode` makes of so many elements."""
    return elements + 2 * blocks_in(elements)


@functools.cache
def implementation() -> Implementation[PortableLinear8]:
    """The kernels of this machine. Call it once before any fork: loading or compiling them later delays a round."""
    return choose(PortableLinear8(), "tt_cli.swarm.compression.linear8_numba:NumbaLinear8", _trial)


def _trial(kernels: PortableLinear8) -> Iterator[tuple[str, object]]:
    """Results for blocks of unlike scales, denormal numbers and halves among them, the last one short."""
    elements = 20 * BLOCK + 99
    draws = np.random.Generator(np.random.PCG64(8))
    values = draws.standard_t(3, elements) * 10.0 ** np.repeat(draws.uniform(-42, 36, 21), BLOCK)[:elements]
    values[BLOCK : 2 * BLOCK] = (np.arange(BLOCK) - 127.5).clip(-127, 127)
    tensor = torch.from_numpy(values.astype(np.float32))
    spoiled = tensor.repeat(3, 1)
    spoiled[:, -1] = torch.tensor([float("nan"), -float("inf"), 1e38])
    coded, decoded, added = np.zeros(encoded_bytes(elements), np.uint8), torch.zeros(elements), torch.ones(elements)
    yield "encoding", (kernels.encode(tensor, coded), coded.tobytes())
    kernels.decode(coded, decoded)
    yield "decoding", decoded.numpy().tobytes()
    for weight in (3.0, 0.1):
        kernels.add(coded, added, np.float32(weight))
    yield "adding", added.numpy().tobytes()
    yield "refusal", [kernels.encode(values, coded) for values in spoiled]


def check_weight(weight: float) -> None:
    if not 0 <= weight <= torch.finfo(torch.float32).max:
        raise ValueError(f"a weight of {weight}")


def check_tensor(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} on {tensor.device} instead of float32 on the CPU")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as (elements,). Raises ValueError where that is not contiguous fp32 on the CPU."""
    check_tensor(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} instead of a contiguous one")
    return tensor.detach().view(-1)


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
        products = blocks * torch.from_numpy(np.float32(1) / widened(bits)).unsqueeze(1)
        torch.from_numpy(out[2 * count :].view(np.int8)).copy_(products.round_().view(-1)[:elements])
        return True

    def decode(self, coded: np.ndarray, out: torch.Tensor) -> None:
        """out = byte * scale."""
        whole, count = out.numel() // BLOCK, blocks_in(out.numel())
        scales = torch.from_numpy(widened(coded[: 2 * count].view("<u2")))
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


def widened(bits: np.ndarray) -> np.ndarray:
    """The fp32 scales of upper halves."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


LOWEST, HIGHEST = (int(bits) for bits in _scale_bits(np.array([SMALLEST, LARGEST], np.float32)))

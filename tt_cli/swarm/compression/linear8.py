"""Gradients in 8 bits: one scale for each block of 256 elements, evenly spaced values within it.

hivemind's own 8-bit codecs are made for any tensor and are slow: theirs look values up in tables. A gradient's block is
near enough to normal that evenly spaced values lose less, and they need no table.

- Form (docs/protocol.md, "How a part is written"): the scales, then one signed byte for each element. A scale is the
  largest magnitude of its block over 127, rounded up to the upper 16 bits of an fp32 number.
- The same bytes on every CPU: only exact maxima, single IEEE divisions, products and sums, and rounding to nearest
  even; no scale is so small that it mattered whether a CPU flushes denormal numbers to zero.
- Whatever is not finite shows in the blocks' maxima, and what a message decodes to is finite when its scales are: no
  further pass over the elements is needed.
- Two implementations give the same bytes: `PortableLinear8` with torch and numpy, and `linear8_numba.py`; see
  `tt_cli/kernel_choice.py`.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import torch

from tt_cli.kernel_choice import Implementation, choose

Buffer = bytes | bytearray | memoryview

BLOCK = 256  # elements
PIECE = 2048  # blocks that are coded at a time: what memory is used besides stays within 2 MiB
LEVELS = np.float32(127)
LARGEST = np.float32(2.0**126)  # magnitude; 127 times its scale is below the largest fp32 number
SMALLEST = np.float32(2.0**-100)  # of a block counts as much; products and scales are then never denormal


def encode(tensor: torch.Tensor) -> bytes:
    """The bytes of an fp32 CPU tensor. Raises ValueError where it is not finite, or above 2^126."""
    out = np.empty(encoded_bytes(tensor.numel()), np.uint8)
    encode_into(tensor, out)
    return out.tobytes()


def encode_into(tensor: torch.Tensor, out: np.ndarray) -> None:
    """Write what `encode` returns into `out`, contiguous uint8 (encoded_bytes(elements),).

    Raises ValueError as `encode` does, and for an `out` of another kind or size; `out` is undefined then.
    """
    _check_tensor(tensor)
    expected = encoded_bytes(tensor.numel())
    if out.dtype != np.uint8 or out.shape != (expected,) or not out.flags.c_contiguous:
        raise ValueError(f"room of {out.dtype} {out.shape} instead of contiguous uint8 ({expected},)")
    if not implementation().kernels.encode(tensor.detach().reshape(-1), out):
        raise ValueError("values that are not finite, or beyond 2^126")


def decode(buffer: Buffer, elements: int) -> torch.Tensor:
    """An fp32 tensor (elements,), finite. Raises ValueError for bytes that `encode` cannot have made."""
    coded = _checked(buffer, elements)  # before memory is allocated
    tensor = torch.empty(elements, dtype=torch.float32)
    implementation().kernels.decode(coded, tensor)
    return tensor


def decode_into(buffer: Buffer, out: torch.Tensor) -> None:
    """Fill `out`, a contiguous fp32 CPU tensor of any shape, with finite numbers.

    Raises ValueError for bytes that `encode` cannot have made of so many elements; `out` is unchanged then.
    """
    implementation().kernels.decode(_checked(buffer, out.numel()), _flat(out))


def add_decoded(buffer: Buffer, accumulator: torch.Tensor, weight: float) -> None:
    """accumulator += decoded * weight, without a tensor in between; accumulator: contiguous fp32 on the CPU, any shape.

    Three fp32 operations on each element, each rounded by itself: byte times scale, that times the weight as fp32, the
    sum. They may overflow: whoever ends the sum looks whether it is finite. Raises ValueError for a weight that is
    negative or not finite, and as `decode_into`, before the accumulator is changed.
    """
    if not 0 <= weight <= torch.finfo(torch.float32).max:
        raise ValueError(f"a weight of {weight}")
    implementation().kernels.add(_checked(buffer, accumulator.numel()), _flat(accumulator), np.float32(weight))


def check(buffer: Buffer, elements: int) -> None:
    """Raise ValueError for bytes that `encode` cannot have made of so many elements; all others decode to numbers."""
    _checked(buffer, elements)


def encoded_bytes(elements: int) -> int:
    """The length of what `encode` makes of so many elements."""
    return elements + 2 * _blocks(elements)


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
        elements, count = values.numel(), _blocks(values.numel())
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


@functools.cache
def implementation() -> Implementation[Linear8Kernels]:
    """The kernels of this machine. Call it once before any fork: loading or compiling them later delays a round."""
    return choose(PortableLinear8(), _compiled, _differences)


def _compiled() -> Linear8Kernels:
    from tt_cli.swarm.compression.linear8_numba import NumbaLinear8

    return NumbaLinear8()


def _differences(compiled: Linear8Kernels) -> list[str]:
    """Names of what differs for blocks of unlike scales, denormal numbers and halves among them, the last one short."""
    portable, elements = PortableLinear8(), 20 * BLOCK + 99
    draws = np.random.Generator(np.random.PCG64(8))
    values = draws.standard_t(3, elements) * 10.0 ** np.repeat(draws.uniform(-42, 36, 21), BLOCK)[:elements]
    values[BLOCK : 2 * BLOCK] = (np.arange(BLOCK) - 127.5).clip(-127, 127)
    tensor = torch.from_numpy(values.astype(np.float32))
    differing = set()
    coded = np.zeros((2, encoded_bytes(elements)), np.uint8)
    if not (portable.encode(tensor, coded[0]) and compiled.encode(tensor, coded[1])) or (coded[0] != coded[1]).any():
        differing.add("encoding")
    for problem in (float("nan"), -float("inf"), 1e38):
        spoiled = tensor.clone()
        spoiled[-1] = problem
        if compiled.encode(spoiled, coded[1]):
            differing.add("refusal")
    outs = torch.zeros(2, elements), torch.ones(2, elements)
    for i, kernels in enumerate((portable, compiled)):
        kernels.decode(coded[0], outs[0][i])
        for weight in (3.0, 0.1):
            kernels.add(coded[0], outs[1][i], np.float32(weight))
    for name, (theirs, ours) in zip(("decoding", "adding"), outs, strict=True):
        if theirs.numpy().tobytes() != ours.numpy().tobytes():
            differing.add(name)
    return sorted(differing)


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} on {tensor.device} instead of float32 on the CPU")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as (elements,). Raises ValueError where that is not contiguous fp32 on the CPU."""
    _check_tensor(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} instead of a contiguous one")
    return tensor.detach().view(-1)


def _checked(buffer: Buffer, elements: int) -> np.ndarray:
    """The bytes as uint8 (encoded_bytes(elements),). Raises ValueError for what `encode` cannot have made."""
    coded = np.frombuffer(buffer, np.uint8)
    if len(coded) != encoded_bytes(elements):
        raise ValueError(f"{len(coded)} bytes instead of {encoded_bytes(elements)} for {elements} elements")
    upper = coded[: 2 * _blocks(elements)].view("<u2")
    # as whole numbers: NaN, infinity and everything negative are above the bound
    if elements and (upper.min() < LOWEST or upper.max() > HIGHEST):
        raise ValueError("scales that are not finite, negative, or out of range")
    return coded


def _blocks(elements: int) -> int:
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
    count = _blocks(elements)
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

"""Moments at rest: 8-bit codes with one fp32 scale (the largest magnitude) per block.

The codes index the dynamic maps of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning"
(arXiv:1511.04561), as used by 8-bit optimizers (arXiv:2110.02861): every decade from 1e-6 to 1 is cut into equal
parts, more of them the higher the decade, and a code stands for the middle of its part.

An element gets the code of the nearest value: but for the seams between decades, that of the part it lies in, which is
`trunc(y * slope + offset)` for y = |x| / scale, with one slope and offset per decade. `Parts` holds these numbers;
whoever encodes must come to the same parts to the last bit.

A second moment gets at least code 1 (`LEAST_SQUARE`), which reads as 3.25e-7 of the largest in its block: nothing but a
block of zeros reads as 0. The nearest value would be 0 for gradients below 1/2500 of the block's largest, whose first
moments have codes of their own; the next update would divide these by the newest gradient and eps alone, and come out
many times too large. That is what happens to the embeddings of rare tokens. At code 1 their updates are too small.

The maps are computed here in double precision, because torch.linspace's last bit depends on the vector width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

DECADES = 7  # that a dynamic map spans
KEY_TO_INDEX = 2**15
LEAST_SQUARE = 1  # the least code that a second moment gets


class LambStep(NamedTuple):
    """The numbers of one step on one tensor. decay: of its weights, 0 where it is free of that."""

    clip_factor: float
    beta1: float
    beta2: float
    eps: float
    decay: float


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic 8-bit data type, ascending, in [-1, 1] or [0, 1]; (256,) fp32."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        steps = _steps(decade, signed)
        for step in range(steps):
            # the middle of one of `steps` equal parts of [0.1, 1]
            value = (0.1 + 0.9 * (2 * step + 1) / (2 * steps)) / 10 ** (DECADES - 1 - decade)
            values += [value, -value] if signed else [value]
    return torch.tensor(sorted(values), dtype=torch.float64).to(torch.float32)


def _steps(decade: int, signed: bool) -> int:
    return 2 ** (decade if signed else decade + 1)


class Parts:
    """The index of the value nearest to y in [0, 1], counted from 0 for zero; the same rule for every decade d.

    From limits[d] on, the middle between the values on both sides of the seam, the part is
    min(trunc(y * slopes[d] + offsets[d]), lasts[d]); below limits[0] it is 0. The last limit is where 1 is nearest.
    `table` holds limits, slopes, offsets and lasts, (4, 8) fp32. The part of a larger y is never smaller, whatever the
    rounding.
    """

    def __init__(self, signed: bool) -> None:
        values = dynamic_map(signed).numpy().astype(numpy.float64)
        values = values[values >= 0]
        rows = []
        first = 1
        for decade in range(DECADES):
            width, steps = 10.0 ** (decade + 1 - DECADES), _steps(decade, signed)
            limit = (values[first - 1] + values[first]) / 2
            rows.append((limit, steps / (0.9 * width), first - steps / 9, first + steps - 1))
            first += steps
        rows.append(((values[-2] + values[-1]) / 2, 0.0, first, first))
        self.count = first  # the part of 1, which is no part's middle
        self.table = numpy.ascontiguousarray(numpy.array(rows, dtype=numpy.float32).T)

    def part(self, y: numpy.ndarray) -> numpy.ndarray:
        """The part of each element of `y` (n,) fp32 in [0, 1]; (n,) int32 from 0 to `count`."""
        limits, slopes, offsets, lasts = self.table
        decade = numpy.searchsorted(limits, y, side="right") - 1
        part = numpy.minimum(y * slopes[decade] + offsets[decade], lasts[decade])
        return numpy.where(decade < 0, 0, part.astype(numpy.int32))

    def starts(self) -> numpy.ndarray:
        """The bits of the smallest fp32 number of each part from 1 on; (count,) int32, ascending."""
        wanted = numpy.arange(1, self.count + 1)
        low = numpy.zeros(self.count, dtype=numpy.int32)  # its part is smaller than wanted
        high = numpy.full(self.count, numpy.float32(1).view(numpy.int32))  # its part is not
        while (high - low > 1).any():
            middle = (low + high) // 2
            enough = self.part(middle.view(numpy.float32)) >= wanted
            low, high = numpy.where(enough, low, middle), numpy.where(enough, middle, high)
        return high


parts = functools.cache(Parts)


@functools.cache
def _encoder(signed: bool) -> Tensor:
    """A table over the top 16 bits of a number's key: (table[key >> 16] + (key & 0xFFFF)) >> 16 is the code.

    Keys are the bits of fp32 numbers as int32, those of negative numbers turned around so that larger numbers have
    larger keys. No two codes begin within the numbers that share 16 bits. (65536,) int32.
    """
    starts = parts(signed).starts().astype(numpy.int64)
    if signed:  # code 127 is zero; a part of a negative number ends where that of its opposite begins
        starts = numpy.concatenate([-starts[:127][::-1], starts])
    buckets = numpy.arange(-(2**15), 2**15)
    base = numpy.searchsorted(starts, buckets << 16)
    following = numpy.append(starts, 2**31)[base]
    low = numpy.where(following >> 16 == buckets, following & 0xFFFF, 0x10000)
    return torch.from_numpy(((base << 16) + 0x10000 - low).astype(numpy.int32))


class BlockwiseMoment:
    """One moment of one tensor of `count` elements: `codes` (count,) uint8 and `absmax` (blocks,) fp32.

    `read` and `write` are the portable implementation: torch's elementwise operations and table look-ups, whose
    results are the same on every processor.
    """

    def __init__(self, count: int, *, block_size: int, signed: bool) -> None:
        self.block_size = block_size
        self.signed = signed
        self.map = dynamic_map(signed)
        zero = int((self.map == 0).nonzero()[0])
        self.codes = torch.full((count,), zero, dtype=torch.uint8)
        self.absmax = torch.zeros(-(-count // block_size), dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors, by what their names end with."""
        return {".codes": self.codes, ".absmax": self.absmax}

    def _rows(self, start: int, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`values` as whole blocks (k, block) with their scales (k, 1), and the same of a last, shorter block."""
        first = start // self.block_size
        whole = values.numel() // self.block_size
        cut = whole * self.block_size
        rows = [(values[:cut].view(whole, -1), self.absmax[first : first + whole, None])] if whole else []
        if cut < values.numel():
            rows.append((values[cut:].view(1, -1), self.absmax[first + whole : first + whole + 1, None]))
        return rows

    def read(self, start: int, out: Tensor, work: Tensor) -> None:
        """Decode the elements from `start` on, which is the start of a block, into `out` (n,) fp32.

        `work` (2, >= n) fp32 is scratch memory.
        """
        index = work[0, : out.numel()].view(torch.int32)
        index.copy_(self.codes[start : start + out.numel()])
        torch.index_select(self.map, 0, index, out=out)
        for block, absmax in self._rows(start, out):
            block.mul_(absmax)

    def write(self, start: int, values: Tensor, work: Tensor) -> None:
        """Encode `values` (n,) fp32, all finite, from element `start` on, which is the start of a block.

        `work` (2, >= n) fp32 is scratch memory.
        """
        count = values.numel()
        scaled, other = work[:, :count]
        torch.abs(values, out=scaled)
        for block, absmax in self._rows(start, scaled):
            torch.amax(block, dim=1, keepdim=True, out=absmax)
            divisor = torch.where(absmax > 0, absmax, 1.0)
            cut = block.storage_offset() - scaled.storage_offset()
            torch.div(values[cut : cut + block.numel()].view_as(block), divisor, out=block)
        key, index = scaled.view(torch.int32), other.view(torch.int32)
        if self.signed:
            torch.bitwise_right_shift(key, 31, out=index)
            key.bitwise_xor_(index.bitwise_and_(0x7FFFFFFF))
        torch.bitwise_right_shift(key, 16, out=index)
        index.add_(KEY_TO_INDEX)
        key.bitwise_and_(0xFFFF)
        # index_select may not write to what it reads from
        key.add_(torch.index_select(_encoder(self.signed), 0, index))
        key.bitwise_right_shift_(16)
        if not self.signed:
            key.clamp_(min=LEAST_SQUARE)
        self.codes[start : start + count].copy_(key)


class PlainMoment:
    """One moment of a small tensor: `values` (count,) fp32, with the interface of `BlockwiseMoment`."""

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count, dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.values}

    def read(self, start: int, out: Tensor, work: Tensor) -> None:
        out.copy_(self.values[start : start + out.numel()])

    def write(self, start: int, values: Tensor, work: Tensor) -> None:
        self.values[start : start + values.numel()].copy_(values)


Moment = BlockwiseMoment | PlainMoment

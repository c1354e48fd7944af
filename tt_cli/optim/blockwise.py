"""Moments at rest: 8-bit codes with one fp32 scale per block, through bitsandbytes' CPU kernels.

The codes index the dynamic maps of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning"
(arXiv:1511.04561), as used by 8-bit optimizers (arXiv:2110.02861). The maps are computed here in double
precision: `bitsandbytes.functional.create_dynamic_map` builds them with `torch.linspace`, whose last bit
depends on the processor's vector width, and all members of a run must decode a code to the same number.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tt_cli.errors import TTError

EXPONENTS = 7  # decades that a dynamic map spans


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide what importing bitsandbytes says about things that its CPU kernels do not need."""
    logger = logging.getLogger("bitsandbytes.cextension")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "no prebuilt binary for CUDA x, loading y instead"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*torch\.jit\.script_method.*", DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)


@functools.cache
def _bitsandbytes() -> Any:
    """The module `bitsandbytes.functional`; TTError if it cannot be used on this machine."""
    try:
        with _quiet_import():
            from bitsandbytes import functional
            from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TTError(f"bitsandbytes cannot be imported ({reason}): pip install bitsandbytes") from error
    if isinstance(lib, ErrorHandlerMockBNBNativeLibrary):
        # without its library, bitsandbytes would quietly use other kernels, with other results
        raise TTError(
            "bitsandbytes found no native library for this machine, so the 8-bit optimizer cannot run; "
            "`python -m bitsandbytes` says why"
        )
    return functional


def warm_up() -> None:
    """Import bitsandbytes and run its kernels once. Call before any fork: later it delays a round."""
    moments = BlockwiseMoment(1, block_size=64, signed=True)
    moments.write(0, torch.ones(1))
    moments.read(0, torch.empty(1))


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic 8-bit data type, ascending, in [-1, 1] or [0, 1]; (256,) fp32."""
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        steps = 2 ** (exponent if signed else exponent + 1)
        for step in range(steps):
            # the middle of one of `steps` equal parts of [0.1, 1]
            value = (0.1 + 0.9 * (2 * step + 1) / (2 * steps)) / 10 ** (EXPONENTS - 1 - exponent)
            values += [value, -value] if signed else [value]
    return torch.tensor(sorted(values), dtype=torch.float64).to(torch.float32)


class BlockwiseMoment:
    """One moment of one tensor of `count` elements: `codes` (count,) uint8 and `absmax` (blocks,) fp32."""

    def __init__(self, count: int, *, block_size: int, signed: bool) -> None:
        self.block_size = block_size
        self.map = dynamic_map(signed)
        zero = int((self.map == 0).nonzero()[0])
        self.codes = torch.full((count,), zero, dtype=torch.uint8)
        self.absmax = torch.zeros(-(-count // block_size), dtype=torch.float32)

    def _blocks(self, start: int, count: int) -> slice:
        return slice(start // self.block_size, -(-(start + count) // self.block_size))

    def read(self, start: int, out: Tensor) -> None:
        """Decode the elements from `start` on into `out` (n,) fp32; `start` is the start of a block."""
        decoded = _bitsandbytes().dequantize_blockwise(
            self.codes[start : start + out.numel()],
            absmax=self.absmax[self._blocks(start, out.numel())],
            code=self.map,
            blocksize=self.block_size,
        )
        out.copy_(decoded)  # its own `out=` is missing on the CPU

    def write(self, start: int, values: Tensor) -> None:
        """Encode `values` (n,) fp32, all finite, from element `start` on; `start` is the start of a block."""
        _bitsandbytes().quantize_blockwise(
            values,
            code=self.map,
            absmax=self.absmax[self._blocks(start, values.numel())],
            out=self.codes[start : start + values.numel()],
            blocksize=self.block_size,
        )


class PlainMoment:
    """One moment of a small tensor: `values` (count,) fp32, with the interface of `BlockwiseMoment`."""

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count, dtype=torch.float32)

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.values[start : start + out.numel()])

    def write(self, start: int, values: Tensor) -> None:
        self.values[start : start + values.numel()].copy_(values)

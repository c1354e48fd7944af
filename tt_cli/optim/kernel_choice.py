"""Which implementation of the optimizer's arithmetic runs here, and why.

The compiled one needs numba and must come to the bytes of the portable one on this very machine: all members of a run
hold the same parameters, so an implementation that differs in one bit is of no use. The portable one always runs.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from tt_cli.optim.blockwise import BlockwiseMoment, PlainMoment
from tt_cli.optim.kernels import LambKernels
from tt_cli.optim.lamb_portable import PortableLamb
from tt_cli.run import folders

INSTALL = "pip install 'tt-cli[numba]'"


@dataclass(frozen=True)
class Implementation:
    """What computes a step: its name, "compiled" or "portable", and the reason for people."""

    kernels: LambKernels
    name: str
    reason: str


@functools.cache
def implementation() -> Implementation:
    """The fastest arithmetic that is right on this machine. The first call loads or compiles it and tests it."""
    try:
        compiled = _compiled()
        faults = _differences(compiled)
    except ImportError as error:
        missing = error.name == "numba"
        return _portable(f"numba is not installed: {INSTALL}" if missing else f"numba cannot be used: {_line(error)}")
    except Exception as error:  # numba, LLVM and the disk have no common error
        return _portable(f"compiling failed: {_line(error)}")
    if faults:
        return _portable(f"the compiled kernels compute other bytes here ({', '.join(faults)})")
    return Implementation(compiled, "compiled", "numba is installed, and its kernels agree with torch to the last bit")


def warm_up() -> None:
    """Compile or load what a step needs, and import bitsandbytes, which hivemind's own 8-bit codec needs.

    Call before any fork: later it delays a round.
    """
    implementation()
    with _quiet_import():
        try:
            import bitsandbytes.functional  # noqa: F401
        except (ImportError, OSError, RuntimeError):
            pass  # whoever needs it says so


def _portable(reason: str) -> Implementation:
    return Implementation(PortableLamb(), "portable", reason)


def _compiled() -> LambKernels:
    """Numba's kernels. Their machine code is kept beside the package, or in this user's folder if that is read-only."""
    from numba import config

    if not (os.access(Path(__file__).parent, os.W_OK) or config.CACHE_DIR):
        config.CACHE_DIR = str(folders.home() / "compiled")
    from tt_cli.optim.lamb_numba import NumbaLamb

    return NumbaLamb()


def _differences(compiled: LambKernels) -> list[str]:
    """What differs after two steps of a few blocks, the last one short; all else is equal byte for byte."""
    names = ("parameter", "update", "first moment", "second moment", "first scale", "second scale", "norms")
    portable = PortableLamb()
    differing = set()
    for count, blockwise in ((3 * 4096 + 1234, True), (5000, False)):
        steps = zip(_two_steps(compiled, count, blockwise), _two_steps(portable, count, blockwise), strict=True)
        for ours, theirs in steps:
            tensors = zip(names, ours, theirs, strict=True)
            differing |= {name for name, a, b in tensors if a.numpy().tobytes() != b.numpy().tobytes()}
    return [name for name in names if name in differing]


def _two_steps(kernels: LambKernels, count: int, blockwise: bool) -> Iterator[list[Tensor]]:
    """After each step: parameter, update, both moments with their scales (none if plain), norms."""
    draws = numpy.random.Generator(numpy.random.PCG64(count))
    scales = numpy.exp(draws.normal(0, 4, count))  # eight decades within a block

    def values(scale: float) -> Tensor:
        return torch.from_numpy((draws.standard_normal(count) * scales * scale).astype(numpy.float32))

    first, second = (
        BlockwiseMoment(count, block_size=4096, signed=signed) if blockwise else PlainMoment(count)
        for signed in (True, False)
    )
    parameter = values(0.02)
    for _ in range(2):
        update = values(1e-3)
        update[:: count // 7] = 0
        gradient_squares = kernels.squares(update, 0.0)
        norms = kernels.moments_and_update(
            parameter, update, first, second, clip_factor=0.3, beta1=0.9, beta2=0.96, eps=1e-6, decay=0.045
        )
        state = [update.clone()]
        kernels.subtract(parameter, update, 1e-3)
        for moment in (first, second):
            state.append(moment.codes.clone() if isinstance(moment, BlockwiseMoment) else moment.values.clone())
        for moment in (first, second):
            state.append(moment.absmax.clone() if isinstance(moment, BlockwiseMoment) else torch.empty(0))
        yield [parameter.clone(), *state, torch.tensor([gradient_squares, *norms], dtype=torch.float64)]


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide what importing bitsandbytes says about things that its CPU kernels do not need."""
    loggers = [logging.getLogger("bitsandbytes.cextension"), logging.getLogger("bitsandbytes.backends.cpu.ops")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)  # "no prebuilt binary for CUDA x, loading y instead", "failed to load …"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*torch\.jit\.script_method.*", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

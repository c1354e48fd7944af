"""The arithmetic of a LAMB step: what kernels must do, the portable ones, and the choice of those that run here.

`PortableLamb` and `lamb_numba.py` give the same bytes; see `tt_cli/kernel_choice.py`. Only separate elementwise
multiplications, additions, divisions and roots, which IEEE 754 fixes to the last bit: `add_(alpha=)`, `addcmul_`,
`addcdiv_` and `lerp_` may fuse a multiplication with an addition on some processors and must not be used here, nor
torch's `sqrt_`, which does not always round correctly. The portable kernels work on chunks of 256Ki elements: a step
needs about 8 MiB at any size.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy
import torch
from torch import Tensor

from tt_cli.kernel_choice import Implementation, choose
from tt_cli.optim.blockwise import BlockwiseMoment, LambStep, Moment, PlainMoment
from tt_cli.optim.sums import SquareSum, add_in_order

if TYPE_CHECKING:
    from tt_cli.optim.lamb_numba import NumbaLamb

CHUNK = 2**18  # elements; a multiple of every block size


class PortableLamb:
    """The kernels with torch, for every machine; one buffer of 28 bytes per element of a chunk.

    All tensors are flat, contiguous fp32 on the CPU.
    """

    def __init__(self) -> None:
        self._sum = SquareSum(CHUNK)
        self._work = torch.empty(5, CHUNK, dtype=torch.float32)

    def squares(self, values: Tensor, total: float) -> float:
        """`total` plus the sums of squares of the blocks of `values`, in the order of `tt_cli.optim.sums`."""
        for chunk in values.split(CHUNK):
            total = add_in_order(total, self._sum.blocks(chunk))
        return total

    def moments_and_update(
        self, parameter: Tensor, gradient: Tensor, first: Moment, second: Moment, step: LambStep
    ) -> tuple[float, float]:
        """Update both moments; `gradient` becomes u = m / (sqrt(v) + eps) + decay * parameter.

        Returns the squares of the norms of the parameter and of u.
        """
        clip_factor, beta1, beta2, eps, decay = step
        parameter_squares = update_squares = 0.0
        for start in range(0, parameter.numel(), CHUNK):
            p = parameter[start : start + CHUNK]
            g = gradient[start : start + CHUNK]
            m, v, work, *_ = self._work[:, : p.numel()]
            scratch = self._work[3:]
            first.read(start, m, scratch)
            second.read(start, v, scratch)
            g.mul_(clip_factor)
            m.mul_(beta1).add_(torch.mul(g, 1 - beta1, out=work))
            v.mul_(beta2).add_(torch.mul(g, g, out=work).mul_(1 - beta2))
            first.write(start, m, scratch)
            second.write(start, v, scratch)
            numpy.sqrt(v.numpy(), out=v.numpy())
            torch.div(m, v.add_(eps), out=g)
            if decay:
                g.add_(torch.mul(p, decay, out=work))
            parameter_squares = add_in_order(parameter_squares, self._sum.blocks(p))
            update_squares = add_in_order(update_squares, self._sum.blocks(g))
        return parameter_squares, update_squares

    def subtract(self, parameter: Tensor, update: Tensor, scale: float) -> None:
        """parameter -= scale * update. The update's memory is free to be overwritten."""
        for p, u in zip(parameter.split(CHUNK), update.split(CHUNK), strict=True):
            p.sub_(u.mul_(scale))


LambKernels: TypeAlias = "PortableLamb | NumbaLamb"


@functools.cache
def implementation() -> Implementation[LambKernels]:
    """The kernels of this machine. The first call loads or compiles them and tests them."""
    return choose(PortableLamb(), "tt_cli.optim.lamb_numba:NumbaLamb", _trial)


def warm_up(*, blockwise: bool = True) -> None:
    """Compile or load what a step needs, and import bitsandbytes, which hivemind's own 8-bit codec needs.

    blockwise: whether it is needed. Call before any fork: later it delays a round. CUDA is not asked: who did must not
    fork.
    """
    implementation()
    if not blockwise:
        return
    logging.disable(logging.WARNING)  # "no prebuilt binary for CUDA x, loading y instead", "failed to load …"
    try:
        with warnings.catch_warnings(), _no_gpu_seen():
            warnings.filterwarnings("ignore", r".*torch\.jit\.script_method.*", DeprecationWarning)
            import bitsandbytes.functional  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        pass  # whoever needs it says so
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _no_gpu_seen() -> Iterator[None]:
    """Have torch say that there is none, as bitsandbytes asks when it is imported; here it computes on CPUs alone."""
    asked = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = asked


def _trial(kernels: LambKernels) -> Iterator[tuple[str, object]]:
    """All that two steps on a few blocks come to, the last one short, and on a small tensor."""
    yield from _two_steps(kernels, 3 * 4096 + 1234, blockwise=True)
    yield from _two_steps(kernels, 5000, blockwise=False)


def _two_steps(kernels: LambKernels, count: int, *, blockwise: bool) -> Iterator[tuple[str, object]]:
    draws = numpy.random.Generator(numpy.random.PCG64(count))
    scales = numpy.exp(draws.normal(0, 4, count))  # eight decades within a block

    def values(scale: float) -> Tensor:
        return torch.from_numpy((draws.standard_normal(count) * scales * scale).astype(numpy.float32))

    first, second = (
        BlockwiseMoment(count, block_size=4096, signed=signed) if blockwise else PlainMoment(count)
        for signed in (True, False)
    )
    parameter = values(0.02)
    step = LambStep(clip_factor=0.3, beta1=0.9, beta2=0.96, eps=1e-6, decay=0.045)
    for _ in range(2):
        update = values(1e-3)
        update[:: count // 7] = 0
        yield "norms", kernels.squares(update, 0.0)
        yield "norms", kernels.moments_and_update(parameter, update, first, second, step)
        yield "update", update.numpy().tobytes()
        kernels.subtract(parameter, update, 1e-3)
        yield "parameter", parameter.numpy().tobytes()
        for name, moment in (("first moment", first), ("second moment", second)):
            yield from ((name + part, tensor.numpy().tobytes()) for part, tensor in moment.tensors().items())

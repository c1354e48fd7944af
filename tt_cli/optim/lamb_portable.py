"""The arithmetic of a LAMB step with torch and numpy, for every machine; `compiled.py` gives the same bytes faster.

Only separate elementwise multiplications, additions, divisions and roots, which IEEE 754 fixes to the last bit.
`add_(alpha=)`, `addcmul_`, `addcdiv_` and `lerp_` may fuse a multiplication with an addition on some processors: they
must not be used here, nor torch's `sqrt_`, which does not always round correctly. Tensors are worked on in chunks of
256Ki elements: a step needs about 8 MiB at any size.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from tt_cli.optim.blockwise import BlockwiseMoment, PlainMoment
from tt_cli.optim.sums import SquareSum, add_in_order

CHUNK = 2**18  # elements; a multiple of every block size


class PortableLamb:
    """`tt_cli.optim.kernels.Kernels` with torch; one buffer of 28 bytes per element of a chunk."""

    def __init__(self) -> None:
        self._sum = SquareSum(CHUNK)
        self._work = torch.empty(5, CHUNK, dtype=torch.float32)

    def squares(self, values: Tensor, total: float) -> float:
        for chunk in values.split(CHUNK):
            total = add_in_order(total, self._sum.blocks(chunk))
        return total

    def moments_and_update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        first: BlockwiseMoment | PlainMoment,
        second: BlockwiseMoment | PlainMoment,
        *,
        clip_factor: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
    ) -> tuple[float, float]:
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
        for p, u in zip(parameter.split(CHUNK), update.split(CHUNK), strict=True):
            p.sub_(u.mul_(scale))

"""What an implementation of the optimizer's arithmetic must do: `portable.py` and `compiled.py`, of equal bytes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tt_cli.optim.blockwise import BlockwiseMoment, PlainMoment


class LambKernels(Protocol):
    """The arithmetic of a step on one tensor at a time; all tensors are flat, contiguous fp32 on the CPU."""

    def squares(self, values: Tensor, total: float) -> float:
        """`total` plus the sums of squares of the blocks of `values`, in the order of `tt_cli.optim.sums`."""

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
        """Update both moments; `gradient` becomes u = m / (sqrt(v) + eps) + decay * parameter.

        Returns the squares of the norms of the parameter and of u.
        """

    def subtract(self, parameter: Tensor, update: Tensor, scale: float) -> None:
        """parameter -= scale * update. The update's memory is free to be overwritten."""

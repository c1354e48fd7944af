"""The reversible trunk: two streams, each block added to one from the other (Gomez et al. 2017, RevNet).

For every pair of branches (f, g): x1 <- x1 + f(x2), then x2 <- x2 + g(x1). Both streams start as the input
and their mean is the output. The backward pass rebuilds the inputs of each branch from its outputs, so memory
does not grow with depth; each branch runs once more. The streams stay in the input's dtype (float32 under
autocast), and a recomputed branch repeats its forward bit for bit, so rebuilding costs only the rounding of
one addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Branch:
    """One residual branch: ``function(x, weights)`` of the shape of x; ``weights`` index the trunk's
    tensors."""

    function: Callable[[Tensor, Sequence[Tensor]], Tensor]
    weights: tuple[int, ...]

    def __call__(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return self.function(x, [tensors[i] for i in self.weights])


def sequential_trunk(x: Tensor, branches: Sequence[Branch], tensors: Sequence[Tensor]) -> Tensor:
    """x <- x + branch(x) for every branch. A different function from the reversible one, weights equal."""
    for branch in branches:
        x = x + branch(x, tensors)
    return x


def reversible_trunk(x: Tensor, branches: Sequence[Branch], tensors: Sequence[Tensor], *, recompute: bool) -> Tensor:
    """Both streams from x (b, n, d), branches in turn f, g, f, g, …; returns the streams' mean.

    ``recompute`` rebuilds activations in the backward pass; otherwise autograd stores them. Same numbers.
    """
    if recompute:
        return _Reversible.apply(x, branches, *tensors)
    return _run(x, branches, tensors)[2]


def _run(x: Tensor, branches: Sequence[Branch], tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x1 = x2 = x
    for f, g in zip(branches[::2], branches[1::2], strict=True):
        x1 = x1 + f(x2, tensors)
        x2 = x2 + g(x1, tensors)
    return x1, x2, (x1 + x2) / 2


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: Sequence[Branch], *tensors: Tensor) -> Tensor:
        x1, x2, out = _run(x, branches, tensors)
        ctx.branches = branches
        ctx.save_for_backward(x1, x2, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2, *saved = ctx.saved_tensors
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in saved]
        sums: list[Tensor | None] = [None] * len(tensors)
        grad1 = grad / 2
        grad2 = grad1.clone()
        for f, g in zip(reversed(ctx.branches[::2]), reversed(ctx.branches[1::2]), strict=True):
            out, into = _replay(g, y1, tensors, grad2, sums)
            y2 = y2 - out  # not in place: the first one belongs to the saved tensors
            grad1 += into
            out, into = _replay(f, y2, tensors, grad1, sums)
            y1 = y1 - out
            grad2 += into
        return grad1 + grad2, None, *sums


def _replay(
    branch: Branch, x: Tensor, tensors: list[Tensor], grad: Tensor, sums: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Run the branch again with gradients; add its weights' gradients to sums; return its output and d/dx."""
    x = x.detach().requires_grad_()
    wanted = [i for i in branch.weights if tensors[i].requires_grad]
    with torch.autocast(x.device.type, enabled=False):  # the backward pass may run inside one
        with torch.enable_grad():
            out = branch(x, tensors)
        into, *grads = torch.autograd.grad(out, [x, *(tensors[i] for i in wanted)], grad)
    for i, piece in zip(wanted, grads, strict=True):
        total = sums[i]
        sums[i] = piece if total is None else total.add_(piece)
    return out.detach(), into

"""The reversible trunk: two streams, each branch added to one from the other (Gomez et al. 2017, RevNet).

For every layer's branches (f, g): x1 <- x1 + f(x2), then x2 <- x2 + g(x1). Both streams start as the input and
their mean is the output. The backward pass rebuilds the inputs of each branch from its outputs, so memory need not
grow with depth.

Notable:
- what there is memory for is kept (`keeping_plan`), the cheapest first: with x2 at hand the backward pass never needs
  g's result, whose last product is a quarter of the layer's work, and x1 is rebuilt from f alone;
- the streams stay in the input's dtype (float32 under autocast), and a repeated branch repeats its forward pass bit
  for bit, so rebuilding costs only the rounding of one float32 addition. In bfloat16 streams it would not be
  harmless: tests/model/test_dalle_training.py measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tt_cli.model.dalle_config import ALL, NOTHING, STREAM, keeping_plan
from tt_cli.model.layers.blocks import AttentionBranch, FeedForwardBranch
from tt_cli.model.layers.fused import fused


@dataclass(frozen=True)
class Half:
    """One branch of one layer, its weights (the third is LayerScale) and where their gradients are summed."""

    branch: AttentionBranch | FeedForwardBranch
    weights: list[Tensor]
    into: list[Tensor]


Layer = Sequence[Half]  # the attention branch and the feed-forward branch


class Trunk:
    """One forward and one backward pass over the layers for x (b, n, dim); both run without autograd.

    What is kept between them takes at most `budget` bytes.
    """

    def __init__(self, layers: Sequence[Layer], x: Tensor, dtype: torch.dtype, budget: int) -> None:
        self.layers, self.dtype = layers, dtype
        branches = sum(half.branch.kept_bytes(x, dtype) for half in layers[0])
        self.plan = keeping_plan(len(layers), x.nbytes, branches, budget)
        self._kept = [_Kept() for _ in layers]
        self._ends: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Both streams from x (b, n, dim); returns their mean and remembers what ``backward`` needs."""
        x1, x2 = x.clone(), x.clone()
        x1_is_kept = False
        for (f, g), level, kept in zip(self.layers, self.plan, self._kept, strict=True):
            out, kept.f = f.branch.output(x2, f.weights, self.dtype, keep=level == ALL)
            x1 = _added(x1, out, f.weights[2], in_place=not x1_is_kept)
            out, kept.g = g.branch.output(x1, g.weights, self.dtype, keep=level == ALL)
            if level >= STREAM:
                kept.x2 = x2
            if x1_is_kept := level == ALL:
                kept.x1 = x1
            x2 = _added(x2, out, g.weights[2], in_place=level == NOTHING)
        self._ends = x1, x2
        return (x1 + x2) / 2

    def backward(self, grad: Tensor) -> Tensor:
        """d/dx from ``grad`` = d/d(result); adds the weights' gradients to each half's ``into``. Only once."""
        if self._ends is None:
            raise RuntimeError("the trunk's backward pass needs a forward pass before it, each time")
        (y1, y2), self._ends = self._ends, None
        grad1 = grad / 2
        grad2 = grad1.clone()
        for i in reversed(range(len(self.layers))):
            (f, g), kept = self.layers[i], self._kept[i]
            self._kept[i] = _Kept()  # its tensors are free once they were used
            if kept.x1 is not None:
                y1 = kept.x1
            out = g.branch.backward(y1, g.weights, (grad2, grad1), g.into, kept.g, want_output=kept.x2 is None)
            if kept.x2 is not None:
                y2 = kept.x2
            elif out is not None:
                y2 = _added(y2, out, g.weights[2], sign=-1)
            x1_is_needed = i > 0 and self._kept[i - 1].x1 is None
            out = f.branch.backward(y2, f.weights, (grad1, grad2), f.into, kept.f, want_output=x1_is_needed)
            if out is not None:
                y1 = _added(y1, out, f.weights[2], sign=-1)
        return grad1 + grad2


@dataclass
class _Kept:
    """All that one layer keeps: the inputs of f and g, and what they can use again."""

    x2: Tensor | None = None
    x1: Tensor | None = None
    f: Sequence[Tensor] = ()
    g: Sequence[Tensor] = ()


def _added(stream: Tensor, out: Tensor, scale: Tensor, *, sign: int = 1, in_place: bool = True) -> Tensor:
    """stream + sign * out * scale, rounded once for the product and once for the sum."""
    return _add_(stream if in_place else stream.clone(), out, scale, sign)


@fused
def _add_(stream: Tensor, out: Tensor, scale: Tensor, sign: int) -> Tensor:
    return stream.add_(out * scale, alpha=sign)

"""The losses of a batch with the gradients of all parameters, by hand: what training at scale runs.

One function from token ids to losses, so that nothing is held twice: matrices are cast to the products' dtype once
per step, the trunk keeps what its budget allows, and the tied matrix has one gradient for both of its uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tt_cli.model.layers.reversible import Half, HandBranch, Layer, Trunk, keeping_plan
from tt_cli.model.losses import Targets, cross_entropies

if TYPE_CHECKING:
    from tt_cli.model.dalle import Dalle


def training_losses(dalle: Dalle, ids: Tensor, targets: Targets, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean cross-entropies (text, image) of ids (b, n), differentiable once with respect to all parameters.

    Matrix products are in ``dtype``. Needs a reversible model.
    """
    return _TrainingLosses.apply(dalle, ids, targets, dtype, *dalle.parameters())


class _TrainingLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dalle: Dalle, ids: Tensor, targets: Targets, dtype: torch.dtype, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        with torch.autocast(ids.device.type, enabled=False):
            x = dalle.embed(ids)
            sums = [torch.zeros_like(p) if wanted and p is not dalle.logits.weight else p for p in parameters]
            layers = _layers(dalle, dict(zip(parameters, sums, strict=True)), dtype)
            plan = keeping_plan(layers, x, dtype, dalle.activation_budget if wanted else 0)
            trunk = Trunk(layers, plan, dtype)
            y = trunk.forward(x)
            norm = dalle.norm
            z, mean, rstd = torch.native_layer_norm(y, norm.weight.shape, norm.weight, norm.bias, 1e-5)
            text, image, head = cross_entropies(
                z, dalle.logits.weight, dalle.logits.bias, targets, dtype, with_gradients=wanted
            )
        if wanted:
            ctx.dalle, ctx.ids, ctx.targets = dalle, ids, targets
            ctx.trunk, ctx.head, ctx.sums = trunk, head, sums
            ctx.save_for_backward(y, mean, rstd, *parameters)
        return text, image

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, text: Tensor, image: Tensor) -> tuple[Tensor | None, ...]:
        y, mean, rstd, *parameters = ctx.saved_tensors  # raises if a parameter was changed since
        if ctx.trunk is None:
            raise RuntimeError("these losses were differentiated before; compute them again")
        (trunk, head), ctx.trunk, ctx.head = (ctx.trunk, ctx.head), None, None
        dalle = ctx.dalle
        sums = dict(zip(parameters, ctx.sums, strict=True))
        sums[dalle.logits.weight], sums[dalle.logits.bias] = head.weight, head.bias
        head.weigh_(ctx.targets, text, image)
        with torch.autocast(y.device.type, enabled=False):
            norm = dalle.norm
            grad, sums[norm.weight], sums[norm.bias] = torch.ops.aten.native_layer_norm_backward(
                head.z, y, norm.weight.shape, mean, rstd, norm.weight, norm.bias, [True, True, True]
            )
            grad = trunk.backward(grad)
            embedding = dalle.logits.weight if dalle.embedding is None else dalle.embedding
            sums[embedding].index_add_(0, ctx.ids.flatten(), grad.flatten(0, 1))
        needed = ctx.needs_input_grad[4:]
        gradients = [sums[p] if wanted else None for p, wanted in zip(parameters, needed, strict=True)]
        ctx.sums = None
        return None, None, None, None, *gradients


def _layers(dalle: Dalle, sums: dict[Tensor, Tensor], dtype: torch.dtype) -> list[Layer]:
    """The trunk's layers; each shared matrix is cast once, norms and LayerScale stay as they are."""
    low: dict[Tensor, Tensor] = {
        p: p.detach().to(dtype) for part in (dalle.attention, dalle.feed_forward) for p in part.parameters()
    }
    layers = []
    for i in range(dalle.config.depth):
        branches: tuple[HandBranch, HandBranch] = (
            dalle.attention_branches[dalle.config.attention_kind(i)],
            dalle.feed_forward_branch,
        )
        f, g = (
            Half(branch, [low[p] if p in low else p.detach() for p in weights], [sums[p] for p in weights])
            for branch, weights in zip(branches, dalle.layer_weights(i), strict=True)
        )
        layers.append((f, g))
    return layers

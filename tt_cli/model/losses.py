"""Cross-entropy of the text and the image part, over only the logits that can occur.

Text rows may only predict text ids and image rows only codes, so the masked matrix of logits falls into two
blocks; the rest is never computed. Each block is walked in chunks of rows whose gradient is formed at once,
so the logits of a batch are never held together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one chunk: few enough to stay in a CPU's cache, enough for efficient matrix products.
_CHUNK_ELEMENTS = 1 << 18


class Losses(NamedTuple):
    """Scalars in nats: the weighted mean to train on, and the mean cross-entropies of text and image."""

    total: Tensor
    text: Tensor
    image: Tensor


class Targets(NamedTuple):
    """Labels (b, n) int64; rows before text_rows choose among the first text_ids ids, the rest later ids."""

    labels: Tensor
    text_rows: int
    text_ids: int


def split_cross_entropy(
    z: Tensor, weight: Tensor, bias: Tensor, targets: Targets, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropies (text, image) in nats of softmax(z W^T + b), float32 or float64 scalars.

    z (b, n, d); weight (V, d); bias (V,). Matrix products are in ``dtype``, softmax and sums in float32 or
    better. The gradients are made in the forward pass.
    """
    return _SplitCrossEntropy.apply(z, weight, bias, targets, dtype)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, targets: Targets, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        labels, text_rows, text_ids = targets
        ctx.split = text_rows, text_ids
        wide = torch.float64 if bias.dtype == torch.float64 else torch.float32
        wanted = any(ctx.needs_input_grad)
        into_z = torch.empty_like(z) if wanted else None
        into_weight = torch.zeros_like(weight, dtype=wide) if wanted else None
        into_bias = torch.zeros_like(bias, dtype=wide) if wanted else None
        losses = []
        with torch.autocast(z.device.type, enabled=False):
            low, wide_bias = weight.to(dtype), bias.to(wide)
            for rows, ids in (
                (slice(0, text_rows), slice(0, text_ids)),
                (slice(text_rows, z.shape[1]), slice(text_ids, weight.shape[0])),
            ):
                block = _Block(z[:, rows].flatten(0, 1), low[ids], wide_bias[ids])
                label = (labels[:, rows] - ids.start).reshape(-1, 1)
                if into_z is None or into_weight is None or into_bias is None:
                    losses.append(block.loss(label))
                    continue
                piece = torch.empty_like(block.z)
                losses.append(block.loss(label, _Block(piece, into_weight[ids], into_bias[ids])))
                into_z[:, rows] = piece.view_as(z[:, rows])
        if wanted:
            ctx.save_for_backward(into_z, into_weight, into_bias)
        return losses[0], losses[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, text: Tensor, image: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, bias = ctx.saved_tensors
        rows, ids = ctx.split
        scaled = [torch.empty_like(t) for t in (z, weight, bias)]
        for source, target, split in (
            (z.transpose(0, 1), scaled[0].transpose(0, 1), rows),
            (weight, scaled[1], ids),
            (bias, scaled[2], ids),
        ):
            torch.mul(source[:split], text, out=target[:split])
            torch.mul(source[split:], image, out=target[split:])
        return *scaled, None, None


class _Block(NamedTuple):
    """Rows z (m, d), weight (ids, d) in the products' dtype, bias (ids,); or the gradients of these."""

    z: Tensor
    weight: Tensor
    bias: Tensor

    def loss(self, label: Tensor, gradients: _Block | None = None) -> Tensor:
        """Mean cross-entropy against label (m, 1); writes gradients.z, adds to the other gradients."""
        rows, ids = self.z.shape[0], self.weight.shape[0]
        wide, dtype = self.bias.dtype, self.weight.dtype
        total = torch.zeros((), dtype=torch.float64, device=self.z.device)
        step = max(1, _CHUNK_ELEMENTS // ids)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            z, right_id = self.z[part].to(dtype), label[part]
            logits = torch.mm(z, self.weight.t()).to(wide).add_(self.bias)
            logits -= logits.amax(dim=1, keepdim=True)
            right = logits.gather(1, right_id)
            sums = logits.exp_().sum(dim=1, keepdim=True)
            total += (sums.log() - right).sum(dtype=torch.float64)
            if gradients is None:
                continue
            # d loss / d logits = (softmax - one-hot) / rows; the division by rows comes last, so that half
            # precision keeps small probabilities
            logits /= sums
            logits.scatter_add_(1, right_id, torch.full_like(right, -1.0))
            error = logits.to(dtype)
            torch.mul(torch.mm(error, self.weight), 1 / rows, out=gradients.z[part])
            gradients.bias.add_(logits.sum(dim=0), alpha=1 / rows)
            if dtype == wide:
                gradients.weight.addmm_(error.t(), z, alpha=1 / rows)
            else:
                gradients.weight.add_(torch.mm(error.t(), z), alpha=1 / rows)
        return (total / rows).to(wide)

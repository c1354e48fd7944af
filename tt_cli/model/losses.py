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

from tt_cli.model.dalle_config import CHUNK_LOGITS
from tt_cli.model.layers.products import add_product_, column_sums, product


class Losses(NamedTuple):
    """Scalars in nats: the weighted mean to train on, and the mean cross-entropies of text and image."""

    total: Tensor
    text: Tensor
    image: Tensor

    def figures(self) -> dict[str, Tensor]:
        """Both cross-entropies by name, without their graphs."""
        return {"text_loss": self.text.detach(), "image_loss": self.image.detach()}


class Targets(NamedTuple):
    """Labels (b, n) int64; rows before text_rows choose among the first text_ids ids, the rest later ids."""

    labels: Tensor
    text_rows: int
    text_ids: int


class HeadGradients(NamedTuple):
    """Gradients of z (b, n, d), of the weight (V, d) and of the bias (V,), each block of its own loss."""

    z: Tensor
    weight: Tensor
    bias: Tensor

    def weigh_(self, targets: Targets, text: Tensor, image: Tensor) -> None:
        """Multiply in place: the text block by the gradient of the text loss, the image block by the other's."""
        for tensor, split in (
            (self.z.transpose(0, 1), targets.text_rows),
            (self.weight, targets.text_ids),
            (self.bias, targets.text_ids),
        ):
            tensor[:split].mul_(text)
            tensor[split:].mul_(image)


def cross_entropies(
    z: Tensor, weight: Tensor, bias: Tensor, targets: Targets, dtype: torch.dtype, *, with_gradients: bool
) -> tuple[Tensor, Tensor, HeadGradients | None]:
    """Mean cross-entropies (text, image) in nats of softmax(z W^T + b), float32 or float64 scalars; gradients.

    z (b, n, d); weight (V, d); bias (V,). Matrix products are in ``dtype``, softmax and sums in float32 or
    better. Runs without autograd.
    """
    labels, text_rows, text_ids = targets
    wide = torch.float64 if bias.dtype == torch.float64 else torch.float32
    gradients = None
    if with_gradients:
        gradients = HeadGradients(
            torch.empty_like(z), torch.zeros_like(weight, dtype=wide), torch.zeros_like(bias, dtype=wide)
        )
    losses = []
    with torch.autocast(z.device.type, enabled=False):
        for rows, ids in (
            (slice(0, text_rows), slice(0, text_ids)),
            (slice(text_rows, z.shape[1]), slice(text_ids, weight.shape[0])),
        ):
            block = _Block(z[:, rows].flatten(0, 1), weight[ids].to(dtype), bias[ids].to(wide))
            label = (labels[:, rows] - ids.start).reshape(-1, 1)
            if gradients is None:
                losses.append(block.loss(label))
                continue
            into = _Block(torch.empty_like(block.z), gradients.weight[ids], gradients.bias[ids])
            losses.append(block.loss(label, into))
            gradients.z[:, rows] = into.z.view_as(z[:, rows])
    return losses[0], losses[1], gradients


class SplitCrossEntropy(torch.autograd.Function):
    """The losses of ``cross_entropies`` for autograd; the gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, targets: Targets, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        text, image, gradients = cross_entropies(z, weight, bias, targets, dtype, with_gradients=wanted)
        ctx.targets = targets
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return text, image

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, text: Tensor, image: Tensor) -> tuple[Tensor | None, ...]:
        gradients = HeadGradients(*(tensor.clone() for tensor in ctx.saved_tensors))
        gradients.weigh_(ctx.targets, text, image)
        return *gradients, None, None


class _Block(NamedTuple):
    """Rows z (m, d), weight (ids, d) in the products' dtype, bias (ids,); or the gradients of these."""

    z: Tensor
    weight: Tensor
    bias: Tensor

    def loss(self, label: Tensor, gradients: _Block | None = None) -> Tensor:
        """Mean cross-entropy against label (m, 1); writes gradients.z, adds to the other gradients."""
        rows, ids = self.z.shape[0], self.weight.shape[0]
        wide, dtype = self.bias.dtype, self.weight.dtype
        precise = torch.float32 if self.z.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        total = torch.zeros((), dtype=precise, device=self.z.device)
        step = max(1, CHUNK_LOGITS["cpu" if self.z.device.type == "cpu" else "cuda"] // ids)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            z, right_id = self.z[part].to(dtype), label[part]
            logits = product(z, self.weight.t()).to(wide).add_(self.bias)
            logits -= logits.amax(dim=1, keepdim=True)
            right = logits.gather(1, right_id)
            sums = logits.exp_().sum(dim=1, keepdim=True)
            total += (sums.log() - right).sum(dtype=precise)
            if gradients is None:
                continue
            # d loss / d logits = (softmax - one-hot) / rows; the division by rows comes last, in gradients' own dtype,
            # so that half precision keeps small probabilities
            logits /= sums
            logits.scatter_add_(1, right_id, torch.full_like(right, -1.0))
            error = logits.to(dtype)
            gradients.z[part] = product(error, self.weight)
            gradients.bias.add_(column_sums(logits), alpha=1 / rows)
            add_product_(gradients.weight, error, z)
        for tensor in gradients[:2] if gradients is not None else ():
            tensor.mul_(1 / rows)
        return (total / rows).to(wide)

"""The DALL-E decoder of "Training Transformers Together" (arXiv:2207.03481): text tokens, then image codes.

Notable:
- weights are stored once per shared set; norms and LayerScale belong to each layer;
- a reversible trunk that keeps no activations, a fused q/k/v projection, rotary on q, k and v;
- attention follows the structure of each layer's type, the loss only the two blocks of logits that can occur;
- under torch.autocast matrix products run in its dtype; streams, norms, angles and softmax stay in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.attention import AttentionPattern
from tt_cli.model.layers.blocks import AttentionBranch, FeedForwardBranch, layer_norm
from tt_cli.model.layers.reversible import Half, Layer, Trunk
from tt_cli.model.losses import Losses, SplitCrossEntropy, Targets, cross_entropies

_START_ID = 0


class Weights(nn.Module):
    """A weight (out, in) or (dim,) with a bias of its first size; the values come from Dalle.initialise."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0]))


class AttentionWeights(nn.Module):
    """One shared set: fused q, k, v projection (no bias) and output projection."""

    def __init__(self, config: DalleConfig) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3 * config.inner_dim, config.dim))
        self.out = Weights(config.dim, config.inner_dim)


class FeedForwardWeights(nn.Module):
    """One shared set: expansion to value and gate, contraction."""

    def __init__(self, config: DalleConfig) -> None:
        super().__init__()
        hidden = config.ff_mult * config.dim
        self.expand = Weights(2 * hidden, config.dim)
        self.contract = Weights(config.dim, hidden)


class BranchWeights(nn.Module):
    """Norm and LayerScale, which each branch of each layer has of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = Weights(dim)
        self.scale = nn.Parameter(torch.empty(dim))

    def tensors(self) -> list[Tensor]:
        """All of them, in the order that the branches take."""
        return [self.norm.weight, self.norm.bias, self.scale]


class LayerWeights(nn.Module):
    """The two branches of one layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = BranchWeights(dim)
        self.feed_forward = BranchWeights(dim)


class Dalle(nn.Module):
    """Decoder over ``text_length + 1`` text positions (a start token first) and the codes of one picture.

    A new model holds the weights of ``initialise(seed)``; on the meta device, or where ``seed`` is None, it holds none.
    ``activation_budget`` (bytes, 0 at first) changes memory and speed of ``loss``, never its values: what a
    reversible trunk may keep for the backward pass. The rest is computed again; see dalle_config.keeping_plan.
    """

    def __init__(self, config: DalleConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.activation_budget = 0
        self.attention = nn.ModuleList(AttentionWeights(config) for _ in range(config.weight_sets))
        self.feed_forward = nn.ModuleList(FeedForwardWeights(config) for _ in range(config.weight_sets))
        self.layers = nn.ModuleList(LayerWeights(config.dim) for _ in range(config.depth))
        self.norm = Weights(config.dim)
        self.logits = Weights(config.vocab, config.dim)
        self.embedding = None if config.tied_embeddings else nn.Parameter(torch.empty(config.vocab, config.dim))
        sizes = config.text_positions, config.image_size, config.conv_kernel
        self.attention_branches = {
            kind: AttentionBranch(config, AttentionPattern(kind, *sizes))
            for kind in {*config.attention_types, config.last_attention}
        }
        self.feed_forward_branch = FeedForwardBranch(config)
        if seed is not None and not self.logits.weight.is_meta:
            self.initialise(seed)

    # -- weights ---

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights from numpy's PCG64 in the order of named_parameters(): same bytes on every CPU.

        Matrices and their biases are uniform in +-1/sqrt(fan_in); norms start at 1 and 0; LayerScale starts
        at 0.1 in the layers 1 to 18, 1e-5 up to 24 and 1e-6 beyond (Touvron et al. 2021, CaiT).
        """
        generator = np.random.Generator(np.random.PCG64(seed))
        fan_in = self.config.dim
        for name, parameter in self.named_parameters():
            if name.endswith(".scale"):
                layer = int(name.split(".")[1])
                parameter.fill_(0.1 if layer < 18 else 1e-5 if layer < 24 else 1e-6)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("norm.bias"):
                parameter.fill_(0.0)
            else:
                if parameter.dim() == 2:  # a bias comes after its matrix and shares its fan-in
                    fan_in = parameter.shape[1]
                values = generator.random(tuple(parameter.shape), dtype=np.float32)
                values *= np.float32(2)
                values -= np.float32(1)
                values *= np.float32(1 / math.sqrt(fan_in))
                parameter.copy_(torch.from_numpy(values))

    # -- training ---

    def loss(self, text: Tensor, image: Tensor) -> Losses:
        """Losses of text (b, text_length) int64 and complete pictures (b, image_size**2) int64.

        total = (text + w * image) / (1 + w) with w = loss_image_weight; padding counts as text.
        """
        config = self.config
        if image.shape[1] != config.image_positions:
            raise ValueError(f"image has {image.shape[1]} codes, a picture has {config.image_positions}")
        ids = self.ids(text, image)
        labels = torch.cat([ids[:, 1:], image[:, -1:] + config.text_ids], dim=1)
        targets = Targets(labels, config.text_length, config.text_ids)
        if config.reversible:
            text_loss, image_loss = _TrainingLosses.apply(self, ids, targets, self.compute_dtype(), *self.parameters())
        else:
            z = self.final_norm(self.trunk(self.embed(ids)))
            text_loss, image_loss = SplitCrossEntropy.apply(
                z, self.logits.weight, self.logits.bias, targets, self.compute_dtype()
            )
        w = config.loss_image_weight
        return Losses((text_loss + w * image_loss) / (1 + w), text_loss, image_loss)

    # -- the parts of the network, shared by training and drawing ---

    def ids(self, text: Tensor, image: Tensor | None) -> Tensor:
        """Start id, text ids with padding (id 0) made unique, image ids: (b, n), at most sequence_length."""
        config = self.config
        if text.dim() != 2 or text.shape[1] != config.text_length:
            raise ValueError(f"text has shape {tuple(text.shape)}, expected (b, {config.text_length})")
        unique = torch.arange(config.text_vocab, config.text_ids, device=text.device)
        parts = [text.new_full((text.shape[0], 1), _START_ID), torch.where(text == 0, unique, text)]
        if image is not None:
            if image.dim() != 2 or image.shape[1] > config.image_positions or len(image) != len(text):
                expected = f"({len(text)}, 0..{config.image_positions})"
                raise ValueError(f"image has shape {tuple(image.shape)}, expected {expected}")
            parts.append(image + config.text_ids)
        return torch.cat(parts, dim=1)[:, : config.sequence_length]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings (..., dim) of ids in 0..vocab-1."""
        return F.embedding(ids, self.logits.weight if self.embedding is None else self.embedding)

    def final_norm(self, x: Tensor) -> Tensor:
        """The LayerNorm before the logits."""
        return layer_norm(x, self.norm.weight, self.norm.bias)

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix products: autocast's where it is on, else the weights' own."""
        weight = self.logits.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def layer_weights(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of layer ``layer`` in the order of AttentionBranch and of FeedForwardBranch."""
        own, shared = cast(LayerWeights, self.layers[layer]), self.config.weight_set(layer)
        attention = cast(AttentionWeights, self.attention[shared])
        feed_forward = cast(FeedForwardWeights, self.feed_forward[shared])
        expand, contract = feed_forward.expand, feed_forward.contract
        return (
            [*own.attention.tensors(), attention.qkv, attention.out.weight, attention.out.bias],
            [*own.feed_forward.tensors(), expand.weight, expand.bias, contract.weight, contract.bias],
        )

    def trunk(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        record: Callable[[int, Tensor, Tensor], object] = lambda layer, k, v: None,
    ) -> Tensor:
        """All layers over x (b, n, dim), differentiable by autograd; returns the same shape.

        ``dtype``: of matrix products, compute_dtype() if None. ``record``: takes (layer, rotated keys, values).
        """
        config, dtype = self.config, dtype or self.compute_dtype()
        x1 = x2 = x
        with torch.autocast(x.device.type, enabled=False):  # the branches cast by themselves
            for layer in range(config.depth):
                weights = self.layer_weights(layer)
                attention = self.attention_branches[config.attention_kind(layer)]
                x1 = x1 + attention(x2 if config.reversible else x1, weights[0], dtype, partial(record, layer))
                added = self.feed_forward_branch(x1, weights[1], dtype)
                if config.reversible:
                    x2 = x2 + added
                else:
                    x1 = x1 + added
        return (x1 + x2) / 2 if config.reversible else x1


class _TrainingLosses(torch.autograd.Function):
    """Mean cross-entropies (text, image) of ids (b, n), differentiable once with respect to all parameters, by hand.

    Nothing is held twice: matrices are cast to the products' ``dtype`` once per step, the trunk keeps what its budget
    allows, and the tied matrix has one gradient for both of its uses. Needs a reversible model.
    """

    @staticmethod
    def forward(
        ctx: Any, dalle: Dalle, ids: Tensor, targets: Targets, dtype: torch.dtype, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        with torch.autocast(ids.device.type, enabled=False):
            x = dalle.embed(ids)
            sums = [torch.empty_like(p) if wanted and p is not dalle.logits.weight else p for p in parameters]
            if wanted:
                torch._foreach_zero_([each for each, p in zip(sums, parameters, strict=True) if each is not p])
            layers = _layers(dalle, dict(zip(parameters, sums, strict=True)), dtype)
            trunk = Trunk(layers, x, dtype, dalle.activation_budget if wanted else 0)
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


def _layers(dalle: Dalle, sums: dict[Tensor, Tensor], dtype: torch.dtype) -> Sequence[Layer]:
    """The trunk's layers; each shared matrix is cast once, norms and LayerScale stay as they are."""
    low: dict[Tensor, Tensor] = {p: p.detach() for p in dalle.layers.parameters()}
    for part in (dalle.attention, dalle.feed_forward):
        low |= {p: p.detach().to(dtype) for p in part.parameters()}

    def half(branch: AttentionBranch | FeedForwardBranch, weights: list[Tensor]) -> Half:
        return Half(branch, [low[p] for p in weights], [sums[p] for p in weights])

    layers = []
    for i in range(dalle.config.depth):
        attention, feed_forward = dalle.layer_weights(i)
        branch = dalle.attention_branches[dalle.config.attention_kind(i)]
        layers.append((half(branch, attention), half(dalle.feed_forward_branch, feed_forward)))
    return layers

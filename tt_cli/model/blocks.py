"""The two branches of a layer: LayerNorm, token shift, then attention or feed-forward, times LayerScale.

A branch is a pure function of its input and weights, so the reversible trunk may run it again. Under a lower
compute dtype the matrix products run in it; norm, scale and the result stay in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tt_cli.model.attention import AttentionPattern
from tt_cli.model.config import DalleConfig
from tt_cli.model.rotary import RotaryTable, split_heads
from tt_cli.model.token_shift import shift_tokens


class Recorder(Protocol):
    """Sees what cached drawing must remember of a branch."""

    def normed(self, h: Tensor) -> None:
        """The branch's normed input (b, n, dim) before the token shift."""

    def keys_values(self, k: Tensor, v: Tensor) -> None:
        """The branch's rotated keys and values, (b, heads, n or more, dim_head)."""


class AttentionBranch:
    """scale * Attention(shift(LayerNorm(x))) of one attention type."""

    def __init__(self, config: DalleConfig, pattern: AttentionPattern, rotary: RotaryTable | None) -> None:
        self.config = config
        self.pattern = pattern
        self.rotary = rotary

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, recorder: Recorder | None = None
    ) -> Tensor:
        """x (b, n, dim); weights: norm weight and bias, scale, qkv, output weight and bias."""
        norm_weight, norm_bias, scale, qkv, out_weight, out_bias = weights
        n = x.shape[1]
        h = _norm_and_shift(self.config, x, norm_weight, norm_bias, recorder)
        table = None if self.rotary is None else self.rotary.to(x.device, dtype)[:n]
        projected = F.linear(h.to(dtype), qkv.to(dtype))
        q, k, v = split_heads(projected, table, self.config.heads, self.pattern.padded_length(n)).unbind()
        if recorder is not None:
            recorder.keys_values(k, v)
        attended = self.pattern.attend(q, k, v, n)
        return F.linear(attended, out_weight.to(dtype), out_bias.to(dtype)) * scale


class FeedForwardBranch:
    """scale * (W2 (a * GELU(gate)) + b2), (a, gate) = W1 shift(LayerNorm(x)) + b1 (GEGLU, Shazeer 2020)."""

    def __init__(self, config: DalleConfig) -> None:
        self.config = config

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, recorder: Recorder | None = None
    ) -> Tensor:
        """x (b, n, dim); weights: norm weight and bias, scale, then expansion and contraction likewise."""
        norm_weight, norm_bias, scale, *matrices = weights
        h = _norm_and_shift(self.config, x, norm_weight, norm_bias, recorder)
        return feed_forward(h, matrices, dtype) * scale


def feed_forward(h: Tensor, matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """GEGLU feed-forward of h (..., dim); matrices: expansion weight, bias, contraction weight, bias."""
    expand, expand_bias, contract, contract_bias = (m.to(dtype) for m in matrices)
    return F.linear(_Geglu.apply(F.linear(h.to(dtype), expand, expand_bias)), contract, contract_bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last axis, eps 1e-5."""
    return F.layer_norm(x, weight.shape, weight, bias)


def _norm_and_shift(config: DalleConfig, x: Tensor, weight: Tensor, bias: Tensor, recorder: Recorder | None) -> Tensor:
    h = layer_norm(x, weight, bias)
    if recorder is not None:
        recorder.normed(h)
    return shift_tokens(h, config.text_positions, config.image_size) if config.shift_tokens else h


class _Geglu(torch.autograd.Function):
    """(…, 2 m) -> (…, m): first half times GELU (erf) of the second; the gradient is written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        active = F.gelu(gate)
        ctx.save_for_backward(x, active)
        return value * active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, active = ctx.saved_tensors
        value, gate = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        into_value, into_gate = out.chunk(2, dim=-1)
        torch.mul(grad, active, out=into_value)
        into_gate.copy_(torch.ops.aten.gelu_backward(grad * value, gate))
        return out

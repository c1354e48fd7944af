"""The two branches of a layer: LayerNorm, token shift, then attention or feed-forward, times LayerScale.

A branch is a pure function of its input and weights. Called, it is differentiable by autograd; `output` and
`backward` are the same by hand, for the trunk that keeps next to nothing. Under a lower compute dtype the matrix
products run in it; norm, scale, sums and the result stay in the weights' dtype.

Notable:
- the gradient of LayerScale needs no output of the branch: with y = s * (W u + b), dL/ds follows from dL/dy^T u,
  which the gradient of W needs anyway. So the last product is not repeated in the backward pass;
- wide activations exist for some rows at a time only, few enough for a CPU's cache;
- in float16 the incoming gradient is scaled to its range for every branch, so no loss scaling is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tt_cli.model.dalle_config import CHUNK_BYTES, DalleConfig
from tt_cli.model.layers.attention import AttentionPattern
from tt_cli.model.layers.fused import fused
from tt_cli.model.layers.products import add_product_, linear, product
from tt_cli.model.layers.rotary import SplitHeads, joined_heads, rotary_table
from tt_cli.model.layers.token_shift import shift_tokens, shifted, unshifted

Tensors = Sequence[Tensor]

_EPS = 1e-5


class AttentionBranch:
    """scale * Attention(shift(LayerNorm(x))) of one attention type."""

    def __init__(self, config: DalleConfig, pattern: AttentionPattern) -> None:
        self.config = config
        self.pattern = pattern

    def __call__(
        self,
        x: Tensor,
        weights: Tensors,
        dtype: torch.dtype,
        record: Callable[[Tensor, Tensor], object] = lambda k, v: None,
    ) -> Tensor:
        """x (b, n, dim); weights: norm weight and bias, scale, qkv, output weight and bias.

        record: takes the rotated keys and values, (b, heads, n or more, dim_head).
        """
        scale, qkv, out_weight, out_bias = weights[2:]
        n = x.shape[1]
        h = _norm_and_shift(self.config, x, weights)
        table = self._rotary(n, x.device, dtype)
        projected = F.linear(h.to(dtype), qkv.to(dtype))
        q, k, v = SplitHeads.apply(projected, table, self.config.heads, self.pattern.padded_length(n)).unbind()
        record(k, v)
        attended = self.pattern.attend(q, k, v, n)
        return F.linear(attended, out_weight.to(dtype), out_bias.to(dtype)) * scale

    def kept_bytes(self, b: int, n: int, dtype: torch.dtype) -> int:
        """Size of what ``output`` gives to be kept."""
        return 3 * b * self.pattern.padded_length(n) * self.config.inner_dim * dtype.itemsize

    def output(self, x: Tensor, weights: Tensors, dtype: torch.dtype, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
        """The branch without LayerScale, (b, n, dim) in ``dtype``; with ``keep`` what ``backward`` can use again."""
        qkv, out_weight, out_bias = weights[3:]
        rotated = self._project(_Normed.of(self.config, x, weights, dtype).h, qkv, x.shape[0])
        parts = rotated.split(self._samples_at_once(rotated), dim=1)
        attended = torch.cat([self.pattern.attend(q, k, v, x.shape[1]) for q, k, v in parts])
        return linear(attended.flatten(0, 1), out_weight, out_bias).view(x.shape), [rotated] if keep else []

    def backward(
        self, x: Tensor, weights: Tensors, grad: Tensor, into: Tensors, kept: Tensors, *, want_output: bool
    ) -> tuple[Tensor, Tensor | None]:
        """d/dx from ``grad`` = d/dy; adds the weights' gradients to ``into``; the output again, if wanted.

        ``weights`` are those of ``output``: norm and scale in x's dtype, matrices in the products' dtype.
        """
        qkv, out_weight, out_bias = weights[3:]
        (b, n, _), dtype = x.shape, qkv.dtype
        normed = _Normed.of(self.config, x, weights, dtype)
        incoming = _Incoming.of(grad, weights[2], dtype)
        rotated = kept[0] if kept else self._project(normed.h, qkv, b)
        table = self._rotary(n, x.device, dtype)
        into_attended = product(incoming.scaled, out_weight).view(b, n, -1)
        parts, into_parts = [], []
        at_once = self._samples_at_once(rotated)
        for part, grad_part in zip(rotated.split(at_once, dim=1), into_attended.split(at_once), strict=True):
            with torch.enable_grad():
                q, k, v = (tensor.detach().requires_grad_() for tensor in part)
                attended = self.pattern.attend(q, k, v, n)
            pieces = torch.autograd.grad(attended, (q, k, v), grad_part)
            into_parts.append(joined_heads(torch.stack(pieces), table, n))
            parts.append(attended.detach())
        attended = torch.cat(parts).flatten(0, 1)
        into_projected = torch.cat(into_parts).flatten(0, 1)
        output = linear(attended, out_weight, out_bias).view(x.shape) if want_output else None
        own = torch.zeros_like(into[4])
        add_product_(own, incoming.plain, attended, incoming.plain_unit)
        _add_output_gradients(into, grad, own, weights)
        add_product_(into[3], into_projected, normed.h, incoming.scaled_unit)
        into_h = product(into_projected, qkv).view(x.shape)
        return normed.backward(self.config, x, weights, into_h, incoming.scaled_unit, into), output

    def _project(self, h: Tensor, qkv: Tensor, b: int) -> Tensor:
        """Rotated q, k, v of h (b * n, dim): (3, b, heads, padded, dim_head)."""
        n = len(h) // b
        table, padded = self._rotary(n, h.device, h.dtype), self.pattern.padded_length(n)
        return SplitHeads.apply(linear(h, qkv).view(b, n, -1), table, self.config.heads, padded)

    def _rotary(self, n: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        c = self.config
        if not c.rotary:
            return None
        return rotary_table(c.dim_head, c.text_positions, c.image_size, device, dtype)[:n]

    def _samples_at_once(self, like: Tensor) -> int:
        return max(1, _chunk_bytes(like) // (self.config.scores * like.element_size()))


class FeedForwardBranch:
    """scale * (W2 (a * GELU(gate)) + b2), (a, gate) = W1 shift(LayerNorm(x)) + b1 (GEGLU, Shazeer 2020)."""

    def __init__(self, config: DalleConfig) -> None:
        self.config = config

    def __call__(self, x: Tensor, weights: Tensors, dtype: torch.dtype) -> Tensor:
        """x (b, n, dim); weights: norm weight and bias, scale, then expansion and contraction likewise."""
        h = _norm_and_shift(self.config, x, weights)
        expand, expand_bias, contract, contract_bias = (matrix.to(dtype) for matrix in weights[3:])
        return F.linear(_Geglu.apply(F.linear(h.to(dtype), expand, expand_bias)), contract, contract_bias) * weights[2]

    def kept_bytes(self, b: int, n: int, dtype: torch.dtype) -> int:
        """Size of what ``output`` gives to be kept."""
        return 2 * b * n * self.config.ff_mult * self.config.dim * dtype.itemsize

    def output(self, x: Tensor, weights: Tensors, dtype: torch.dtype, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
        """The branch without LayerScale, (b, n, dim) in ``dtype``; with ``keep`` what ``backward`` can use again."""
        expand, expand_bias, contract, contract_bias = weights[3:]
        h = _Normed.of(self.config, x, weights, dtype).h
        out, kept = torch.empty_like(h), []
        for rows in _chunks(len(h), expand):
            expanded = linear(h[rows], expand, expand_bias)
            out[rows] = linear(geglu(expanded), contract, contract_bias)
            if keep:
                kept.append(expanded)
        return out.view(x.shape), kept

    def backward(
        self, x: Tensor, weights: Tensors, grad: Tensor, into: Tensors, kept: Tensors, *, want_output: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBranch.backward."""
        expand, expand_bias, contract, contract_bias = weights[3:]
        normed = _Normed.of(self.config, x, weights, expand.dtype)
        h = normed.h
        incoming = _Incoming.of(grad, weights[2], expand.dtype)
        into_h, own = torch.empty_like(h), torch.zeros_like(into[5])
        output = torch.empty_like(h) if want_output else None
        for number, rows in enumerate(_chunks(len(h), expand)):
            expanded = kept[number] if kept else linear(h[rows], expand, expand_bias)
            active, into_expanded = geglu_gradient(expanded, product(incoming.scaled[rows], contract))
            if output is not None:
                output[rows] = linear(active, contract, contract_bias)
            add_product_(own, incoming.plain[rows], active, incoming.plain_unit)
            add_product_(into[3], into_expanded, h[rows], incoming.scaled_unit)
            summed = into_expanded.sum(dim=0).to(into[4].dtype)  # half precision is summed in float32 and rounded once
            into[4].add_(summed if incoming.scaled_unit is None else summed * incoming.scaled_unit)
            into_h[rows] = product(into_expanded, expand)
        _add_output_gradients(into, grad, own, weights)
        into_x = normed.backward(self.config, x, weights, into_h.view(x.shape), incoming.scaled_unit, into)
        return into_x, None if output is None else output.view(x.shape)


@fused
def geglu(x: Tensor) -> Tensor:
    """(…, 2 m) -> (…, m): first half times GELU (erf) of the second."""
    value, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(value)


@fused
def geglu_gradient(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``geglu(x)`` again, and the gradient of x from that of the result; ``grad`` may be overwritten."""
    value, gate = x.chunk(2, dim=-1)
    active = F.gelu(gate)
    if torch.compiler.is_compiling():  # the compiler leaves nothing between these two to be saved
        into_gate = torch.ops.aten.gelu_backward(grad * value, gate)
        return active * value, torch.cat([grad * active, into_gate], dim=-1)
    into = torch.empty_like(x)
    into_value, into_gate = into.chunk(2, dim=-1)
    torch.mul(grad, active, out=into_value)
    torch.ops.aten.gelu_backward.grad_input(grad.mul_(value), gate, grad_input=into_gate)
    return active.mul_(value), into


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last axis, eps 1e-5."""
    return F.layer_norm(x, weight.shape, weight, bias, _EPS)


def _norm_and_shift(config: DalleConfig, x: Tensor, weights: Tensors) -> Tensor:
    h = layer_norm(x, weights[0], weights[1])
    return shift_tokens(h, config.text_positions, config.image_size) if config.shift_tokens else h


class _Normed(NamedTuple):
    """shift(LayerNorm(x)) as rows (b * n, dim) in the products' dtype, and the norm's statistics."""

    h: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, config: DalleConfig, x: Tensor, weights: Tensors, dtype: torch.dtype) -> _Normed:
        return cls(
            *_normed(
                x,
                weights[0],
                weights[1],
                (config.text_positions, config.image_size) if config.shift_tokens else None,
                dtype,
            )
        )

    def backward(
        self, config: DalleConfig, x: Tensor, weights: Tensors, grad: Tensor, unit: Tensor | None, into: Tensors
    ) -> Tensor:
        """d/dx from d/dh (b, n, dim) in units of ``unit``; adds the norm's gradients to ``into``."""
        sizes = config.text_positions, config.image_size
        grad = unshifted(grad, *sizes, x.dtype) if config.shift_tokens else grad.to(x.dtype)
        if unit is not None:
            grad = grad.mul_(unit)
        weight, bias = weights[:2]
        into_x, into_weight, into_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, self.mean, self.rstd, weight, bias, [True, True, True]
        )
        into[0].add_(into_weight)
        into[1].add_(into_bias)
        return into_x


@fused
def _normed(
    x: Tensor, weight: Tensor, bias: Tensor, shift: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    h, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, _EPS)
    h = h.to(dtype) if shift is None else shifted(h, *shift, dtype)
    return h.flatten(0, 1), mean, rstd


class _Incoming(NamedTuple):
    """The gradient of a branch's result as rows in the products' dtype: as it is, and times LayerScale.

    In float16 each is in units of its own largest entry, for LayerScale is as small as 1e-6.
    """

    plain: Tensor
    scaled: Tensor
    plain_unit: Tensor | None = None
    scaled_unit: Tensor | None = None

    @classmethod
    def of(cls, grad: Tensor, scale: Tensor, dtype: torch.dtype) -> _Incoming:
        plain = grad.flatten(0, 1)
        scaled = plain * scale
        if dtype != torch.float16:
            return cls(plain.to(dtype), scaled.to(dtype))
        smallest = torch.finfo(torch.float32).tiny
        units = [x.abs().amax().clamp_min(smallest) for x in (plain, scaled)]
        return cls((plain / units[0]).to(dtype), (scaled / units[1]).to(dtype), *units)


def _add_output_gradients(into: Tensors, grad: Tensor, own: Tensor, weights: Tensors) -> None:
    """Add the gradients of s, W and b of y = s * (W u + b), given own = (dL/dy)^T u; they are into[2], [-2], [-1]."""
    (scale, *_, weight, bias), total = weights[2:], grad.sum(dim=(0, 1))
    into[2].add_(torch.linalg.vecdot(own, weight.to(own.dtype))).add_(total * bias.to(own.dtype))
    into[-2].addcmul_(own, scale[:, None])
    into[-1].addcmul_(total, scale)


def _chunk_bytes(like: Tensor) -> int:
    return CHUNK_BYTES["cpu" if like.device.type == "cpu" else "cuda"]


def _chunks(rows: int, weight: Tensor) -> Iterator[slice]:
    """Even parts of ``rows`` whose products with weight (n, k) stay within the chunk's bytes."""
    parts = -(-rows * len(weight) * weight.element_size() // _chunk_bytes(weight))
    size = -(-rows // max(1, parts))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _Geglu(torch.autograd.Function):
    """See geglu; for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return geglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return geglu_gradient(x, grad.clone())[1]

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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tt_cli.model.dalle_config import CHUNK_BYTES, DalleConfig
from tt_cli.model.layers import axial_attention
from tt_cli.model.layers.attention import AttentionPattern
from tt_cli.model.layers.axial_attention import AxialLines, Tensors, lines_of
from tt_cli.model.layers.fused import fused
from tt_cli.model.layers.products import add_product_, column_sums, linear, product
from tt_cli.model.layers.rotary import SplitHeads, joined_heads, rotary_factors, rotary_table
from tt_cli.model.layers.token_shift import ShiftTokens, shifted, sources, unshifted

_EPS = 1e-5


class AttentionBranch:
    """scale * Attention(shift(LayerNorm(x))) of one attention type."""

    def __init__(
        self, config: DalleConfig, pattern: AttentionPattern, on_lines: Callable[..., bool] = axial_attention.is_served
    ) -> None:
        """on_lines: tells whether `output` and `backward` attend by axial_attention."""
        self.config, self.pattern, self.on_lines = config, pattern, on_lines

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
        table = rotary_table(self.config, x.device, dtype)
        projected = F.linear(h.to(dtype), qkv.to(dtype))
        q, k, v = SplitHeads.apply(projected, table, self.config.heads, self.pattern.padded_length(n)).unbind()
        record(k, v)
        attended = self.pattern.attend(q, k, v, n)
        return F.linear(attended, out_weight.to(dtype), out_bias.to(dtype)) * scale

    def kept_bytes(self, x: Tensor, dtype: torch.dtype) -> int:
        """Size of what ``output`` of x gives to be kept."""
        return 3 * len(x) * self.pattern.padded_length(x.shape[1]) * self.config.inner_dim * dtype.itemsize

    def output(self, x: Tensor, weights: Tensors, dtype: torch.dtype, *, keep: bool) -> tuple[Tensor, Tensors]:
        """The branch without LayerScale, (b, n, dim) in ``dtype``; with ``keep`` what ``backward`` can use again."""
        qkv, out_weight, out_bias = weights[3:]
        rotated = self._project(_normed_of(self.config, x, weights, dtype)[0], qkv, x.shape[0])
        if lines := self._lines(x.shape[1], x.device, dtype):
            attended = axial_attention.attend(rotated, lines)
        else:
            parts = rotated[0].split(self._samples_at_once(rotated[0]), dim=1)
            attended = torch.cat([self.pattern.attend(q, k, v, x.shape[1]) for q, k, v in parts])
        return linear(attended.flatten(0, 1), out_weight, out_bias).view(x.shape), rotated if keep else []

    def backward(
        self, x: Tensor, weights: Tensors, grads: Tensors, into: Tensors, kept: Tensors, *, want_output: bool
    ) -> Tensor | None:
        """Add d/dx, from grads[0] = d/dy, to grads[1], the weights' gradients to ``into``; the output again, if wanted.

        ``weights`` are those of ``output``: norm and scale in x's dtype, matrices in the products' dtype.
        """
        qkv, out_weight, out_bias = weights[3:]
        (b, n, _), dtype = x.shape, qkv.dtype
        h, *statistics = _normed_of(self.config, x, weights, dtype)
        incoming = _incoming(grads[0], weights[2], dtype)
        rotated = kept or self._project(h, qkv, b)
        into_attended = product(incoming.scaled, out_weight).view(b, n, -1)
        attended, into_projected = self._attended_backward(rotated, into_attended)
        output = linear(attended, out_weight, out_bias).view(x.shape) if want_output else None
        own = torch.zeros_like(into[4])
        add_product_(own, incoming.plain, attended, incoming.plain_unit)
        _add_output_gradients(own, incoming.total, weights[2], *weights[-2:], into[2], *into[-2:])
        add_product_(into[3], into_projected, h, incoming.scaled_unit)
        into_h = product(into_projected, qkv).view(x.shape)
        shift, unit = _shift(self.config, x, -1), incoming.scaled_unit
        _add_norm_gradients_(grads[1], into_h, x, *statistics, *weights[:2], into=into[:2], unit=unit, shift=shift)
        return output

    def _attended_backward(self, rotated: Tensors, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Attended values again (b * n, inner), and the projection's gradient from grad (b, n, inner)."""
        n, dtype = grad.shape[1], grad.dtype
        if lines := self._lines(n, grad.device, dtype):
            attended, gradients = axial_attention.attend_with_gradient(rotated, lines, grad)
            return attended.flatten(0, 1), axial_attention.from_lines(*gradients, lines=lines).flatten(0, 1)
        table = rotary_table(self.config, grad.device, dtype)
        parts, into_parts = [], []
        at_once = self._samples_at_once(rotated[0])
        for part, grad_part in zip(rotated[0].split(at_once, dim=1), grad.split(at_once), strict=True):
            with torch.enable_grad():
                q, k, v = (tensor.detach().requires_grad_() for tensor in part)
                attended = self.pattern.attend(q, k, v, n)
            pieces = torch.autograd.grad(attended, (q, k, v), grad_part)
            into_parts.append(joined_heads(torch.stack(pieces), table, n))
            parts.append(attended.detach())
        return torch.cat(parts).flatten(0, 1), torch.cat(into_parts).flatten(0, 1)

    def _project(self, h: Tensor, qkv: Tensor, b: int) -> Tensors:
        """Rotated q, k, v of h (b * n, dim): one (3, b, heads, padded, dim_head), or as axial_attention has them."""
        n, heads = len(h) // b, self.config.heads
        projected = linear(h, qkv).view(b, n, -1)
        if lines := self._lines(n, h.device, h.dtype):
            return axial_attention.to_lines(projected, lines, heads)
        table = rotary_table(self.config, h.device, h.dtype)
        return [SplitHeads.apply(projected, table, heads, self.pattern.padded_length(n))]

    def _lines(self, n: int, device: torch.device, dtype: torch.dtype) -> AxialLines | None:
        """AxialLines of n positions where axial_attention serves them."""
        kind, config = self.pattern.kind, self.config
        served = self.on_lines(kind, config.image_size, config.dim_head, device, dtype)
        return lines_of(kind, config, n, rotary_factors(config, device, dtype)) if served else None

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

    def kept_bytes(self, x: Tensor, dtype: torch.dtype) -> int:
        """Size of what ``output`` of x gives to be kept."""
        return 2 * x.numel() * self.config.ff_mult * dtype.itemsize

    def output(self, x: Tensor, weights: Tensors, dtype: torch.dtype, *, keep: bool) -> tuple[Tensor, Tensors]:
        """The branch without LayerScale, (b, n, dim) in ``dtype``; with ``keep`` what ``backward`` can use again."""
        expand, expand_bias, contract, contract_bias = weights[3:]
        h = _normed_of(self.config, x, weights, dtype)[0]
        out, kept = list[Tensor](), []
        for rows in _chunks(len(h), expand):
            expanded = linear(h[rows], expand, expand_bias)
            out.append(linear(geglu(expanded), contract, contract_bias))
            if keep:
                kept.append(expanded)
        return _together(out, x), kept

    def backward(
        self, x: Tensor, weights: Tensors, grads: Tensors, into: Tensors, kept: Tensors, *, want_output: bool
    ) -> Tensor | None:
        """See AttentionBranch.backward."""
        expand, expand_bias, contract, contract_bias = weights[3:]
        h, *statistics = _normed_of(self.config, x, weights, expand.dtype)
        incoming = _incoming(grads[0], weights[2], expand.dtype)
        into_h, output, own = list[Tensor](), list[Tensor](), torch.zeros_like(into[5])
        for number, rows in enumerate(_chunks(len(h), expand)):
            expanded = kept[number] if kept else linear(h[rows], expand, expand_bias)
            into_active = product(incoming.scaled[rows], contract)
            active, into_expanded = geglu_gradient(expanded, into_active, into[4], incoming.scaled_unit)
            if want_output:
                output.append(linear(active, contract, contract_bias))
            add_product_(own, incoming.plain[rows], active, incoming.plain_unit)
            add_product_(into[3], into_expanded, h[rows], incoming.scaled_unit)
            into_h.append(product(into_expanded, expand))
        _add_output_gradients(own, incoming.total, weights[2], *weights[-2:], into[2], *into[-2:])
        shift, unit, grad = _shift(self.config, x, -1), incoming.scaled_unit, _together(into_h, x)
        _add_norm_gradients_(grads[1], grad, x, *statistics, *weights[:2], into=into[:2], unit=unit, shift=shift)
        return _together(output, x) if want_output else None


def _together(parts: list[Tensor], like: Tensor) -> Tensor:
    """Parts by rows as one of that shape; nothing is copied where there is one alone."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(like.shape)


@fused
def geglu(x: Tensor) -> Tensor:
    """(…, 2 m) -> (…, m): first half times GELU (erf) of the second."""
    value, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(value)


def geglu_gradient(
    x: Tensor, grad: Tensor, into_bias: Tensor | None = None, unit: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``geglu(x)`` of rows again, and the gradient of x from that of the result; ``grad`` may be overwritten.

    The gradient's sum over all rows, in units of ``unit``, is added to ``into_bias`` where there is one.
    """
    into = torch.empty_like(x)
    active = _geglu_gradient(x, grad, *into.chunk(2, dim=1))
    if into_bias is not None:
        summed = column_sums(into)
        into_bias.add_(summed if unit is None else summed.to(into_bias.dtype) * unit)
    return active, into


@fused
def _geglu_gradient(x: Tensor, grad: Tensor, into_value: Tensor, into_gate: Tensor) -> Tensor:
    """See `geglu_gradient`. Writes the halves where they are to be: joined by the compiler, each is computed twice."""
    value, gate = x.chunk(2, dim=1)
    active = F.gelu(gate)
    if torch.compiler.is_compiling():  # the compiler leaves nothing between these to be saved
        into_gate.copy_(torch.ops.aten.gelu_backward(grad * value, gate))
        into_value.copy_(grad * active)
        return active * value
    torch.mul(grad, active, out=into_value)
    torch.ops.aten.gelu_backward.grad_input(grad.mul_(value), gate, grad_input=into_gate)
    return active.mul_(value)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last axis, eps 1e-5."""
    return F.layer_norm(x, weight.shape, weight, bias, _EPS)


def _norm_and_shift(config: DalleConfig, x: Tensor, weights: Tensors) -> Tensor:
    h = layer_norm(x, weights[0], weights[1])
    return ShiftTokens.apply(h, config.text_positions, config.image_size) if config.shift_tokens else h


class _Shift(NamedTuple):
    """The token shift: its sizes, and `token_shift.sources` for compiled kernels."""

    sizes: tuple[int, int]
    sources: Tensor


def _shift(config: DalleConfig, x: Tensor, sign: int) -> _Shift | None:
    sizes = config.text_positions, config.image_size
    return _Shift(sizes, sources(x.shape[1], *sizes, sign, x.device)) if config.shift_tokens else None


def _normed_of(config: DalleConfig, x: Tensor, weights: Tensors, dtype: torch.dtype) -> Tensors:
    """shift(LayerNorm(x)) as rows (b * n, dim) in the products' dtype, and the norm's mean and 1 / deviation."""
    return _normed(x, weights[0], weights[1], _shift(config, x, 1), dtype)


def _taken(x: Tensor, sources: Tensor) -> Tensor:
    """x (b, n, d or 1) by quarters of channels (b, n, 4, d / 4 or 1) from the positions ``sources`` (n, 4)."""
    quarters = x.unflatten(2, (4, -1)) if x.shape[2] > 1 else x[:, :, None].expand(-1, -1, 4, 1)
    return quarters.gather(1, sources.clamp_min(0)[None, :, :, None].expand(len(x), -1, -1, quarters.shape[3]))


@fused
def _normed(
    x: Tensor, weight: Tensor, bias: Tensor, shift: _Shift | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if shift is not None and torch.compiler.is_compiling():  # two kernels: the statistics; the values by index
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        rstd = (variance + _EPS).rsqrt()
        h = (_taken(x, shift.sources) - _taken(mean, shift.sources)) * _taken(rstd, shift.sources)
        h = h * weight.view(4, -1) + bias.view(4, -1)
        return torch.where(shift.sources[:, :, None] < 0, 0, h).to(dtype).flatten(2).flatten(0, 1), mean, rstd
    h, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, _EPS)
    h = h.to(dtype) if shift is None else shifted(h, *shift.sizes, dtype)
    return h.flatten(0, 1), mean, rstd


@fused
def _add_norm_gradients_(
    total: Tensor, grad: Tensor, *norm: Tensor, into: Tensors, unit: Tensor | None, shift: _Shift | None
) -> None:
    x, mean, rstd, weight, bias = norm
    if shift is None:
        grad = grad.to(x.dtype)
    elif torch.compiler.is_compiling():
        taken = torch.where(shift.sources[:, :, None] < 0, 0, _taken(grad, shift.sources))
        grad = taken.flatten(2).to(x.dtype)
    else:
        grad = unshifted(grad, *shift.sizes, x.dtype)
    if unit is not None:
        grad = grad.mul_(unit)
    added = torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, [True] * 3)
    for tensor, part in zip((total, *into), added, strict=True):
        tensor.add_(part)


class _Incoming(NamedTuple):
    """The gradient of a branch's result as rows in the products' dtype: as it is, and times LayerScale; its sum.

    In float16 each is in units of its own largest entry, for LayerScale is as small as 1e-6.
    """

    total: Tensor
    plain: Tensor
    scaled: Tensor
    plain_unit: Tensor | None = None
    scaled_unit: Tensor | None = None


@fused
def _incoming(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> _Incoming:
    plain = grad.flatten(0, 1)
    total, scaled = column_sums(plain), plain * scale
    if dtype != torch.float16:
        return _Incoming(total, plain.to(dtype), scaled.to(dtype))
    smallest = torch.finfo(torch.float32).tiny
    units = [x.abs().amax().clamp_min(smallest) for x in (plain, scaled)]
    return _Incoming(total, (plain / units[0]).to(dtype), (scaled / units[1]).to(dtype), *units)


@fused
def _add_output_gradients(
    own: Tensor, total: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, *into: Tensor
) -> None:
    """Add the gradients of s, W and b of y = s * (W u + b) to ``into``: own = (dL/dy)^T u, total = sum of dL/dy."""
    into[0].add_(torch.linalg.vecdot(own, weight.to(own.dtype))).add_(total * bias.to(own.dtype))
    into[1].addcmul_(own, scale[:, None])
    into[2].addcmul_(total, scale)


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
        return geglu_gradient(x.flatten(0, -2), grad.flatten(0, -2).clone())[1].view(x.shape)

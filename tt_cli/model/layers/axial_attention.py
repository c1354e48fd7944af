"""Axial attention by a GPU's fused kernels: scores are never in memory.

An image position's softmax runs over the text and over its own line, a row or a column. That is two calls of a fused
kernel: all positions over the text, and each line over itself. Their log-sum-exps join both results as in ring
attention (Liu et al. 2023, arXiv:2310.01889); given the joined result and log-sum-exp, the backward kernel of each call
gives its exact part of the gradient, for it needs no more of the softmax (Dao et al. 2022, arXiv:2205.14135).

Queries, keys and values are kept as lines, (b, lines, side, heads, dim_head): the text, padded to whole lines, then the
image's rows or columns. So a line is an example of the second call and nothing is copied for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tt_cli.model.layers.fused import fused

_ALIGNED = 32  # queries that the kernel pads log-sum-exps to
DEVICES = {"cuda"}  # that have the kernels
Called = tuple[Tensor, ...]  # of one call: its result and log-sum-exp, then the seed and offset of no dropout


class AxialLines(NamedTuple):
    """Lines of ``side`` places, ``before`` of them for ``text`` positions; where which position is."""

    text: int
    side: int
    before: int
    position: Tensor  # of each place, (lines * side,); -1 for padding
    place: Tensor  # of each position, (n,)


@lru_cache(maxsize=16)
def lines_of(kind: str, text: int, side: int, n: int, device: torch.device) -> AxialLines:
    """The lines of n positions, ``text`` of them text, for attention of this kind."""
    before = -(-text // side)
    place, position = (torch.arange(size, device="cpu") for size in ((before + side) * side, n))

    def turned(image: Tensor) -> Tensor:
        return image % side * side + image // side if kind == "axial_col" else image

    found = torch.where(place < before * side, place, text + turned(place - before * side))
    is_there = torch.where(place < before * side, place < text, found < n)
    places = torch.where(position < text, position, before * side + turned(position - text))
    return AxialLines(text, side, before, torch.where(is_there, found, -1).to(device), places.to(device))


def is_served(kind: str, side: int, dim_head: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether attention of this kind runs here, else by `AttentionPattern.attend`."""
    fits = kind != "conv_like" and side % _ALIGNED == 0 and dim_head % 8 == 0
    return fits and device.type in DEVICES and dtype != torch.float64


def attend(rotated: Tensor, lines: AxialLines) -> Tensor:
    """Attend with rotated q, k, v (3, b, lines, side, heads, dim_head): (b, n, heads * dim_head)."""
    found = [x for call in _calls(rotated, lines) for x in _forward(*call)[:2]]
    return _joined(*found, lines=lines, for_backward=False)[0]


def attend_with_gradient(rotated: Tensor, lines: AxialLines, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`attend` again; gradients of q, k, v of both calls, for `from_lines`, from that of the result."""
    over_text, over_lines = _calls(rotated, lines)
    text, line = _forward(*over_text), _forward(*over_lines)
    attended, out, text_norm, line_norm = _joined(*text[:2], *line[:2], lines=lines, for_backward=True)
    pair = [spread(grad, lines, rotated.shape[4]), out]
    of_text = _backward(over_text, [x.flatten(1, 2).transpose(1, 2) for x in pair], text_norm, text[2:])
    of_lines = _backward(over_lines, [x.flatten(0, 1).transpose(1, 2) for x in pair], line_norm, line[2:])
    return attended, [*of_text, *of_lines]


def _calls(rotated: Tensor, lines: AxialLines) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v (b, heads, places, dim_head) over the text, and (b * lines, heads, side, dim_head) over each line."""
    q, k, v = (x.flatten(1, 2).transpose(1, 2) for x in rotated.unbind())
    by_line = [x.flatten(0, 1).transpose(1, 2) for x in rotated.unbind()]
    return [q, k[:, :, : lines.text], v[:, :, : lines.text]], by_line


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Called:
    """Causal from the upper left: result, log-sum-exp (batch, heads, queries) and what the backward kernel asks for."""
    if q.device.type == "cpu":
        return tuple(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True))
    return tuple(torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True))


def _backward(qkv: list[Tensor], pair: list[Tensor], norm: Tensor, seeds: Called) -> list[Tensor]:
    """Gradients of q, k, v; pair: the result's gradient and the result."""
    aten, (grad, out) = torch.ops.aten, pair
    if grad.device.type == "cpu":
        return list(aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *qkv, out, norm, 0.0, True))
    masked = None, out, norm, *seeds, 0.0, [True, True, True, False], True
    return list(aten._scaled_dot_product_efficient_attention_backward(grad, *qkv, *masked)[:3])


@fused
def to_lines(projected: Tensor, rotation: Tensor | None, lines: AxialLines, heads: int) -> Tensor:
    """Split a fused projection (b, n, 3 * heads * dim_head) and rotate: (3, b, lines, side, heads, dim_head)."""
    position = lines.position.clamp_min(0)
    factors = None if rotation is None else (rotation[0, position, None, None], rotation[1, position, None, None])
    turned = _turned(projected.unflatten(2, (3, heads, -1)), position, factors)
    turned = torch.where(lines.position[:, None, None, None] < 0, 0, turned).to(projected.dtype)
    return turned.permute(2, 0, 1, 3, 4).unflatten(2, (-1, lines.side)).contiguous()


@fused
def spread(grad: Tensor, lines: AxialLines, heads: int) -> Tensor:
    """(b, n, heads * dim_head) as (b, lines, side, heads, dim_head), 0 where there is no position."""
    taken = torch.where(lines.position[:, None] < 0, 0, grad[:, lines.position.clamp_min(0)])
    return taken.unflatten(2, (heads, -1)).unflatten(1, (-1, lines.side))


@fused
def from_lines(*gradients: Tensor, rotation: Tensor | None, lines: AxialLines) -> Tensor:
    """The gradient (b, n, 3 * heads * dim_head) of what `to_lines` split, from both calls' gradients of q, k, v."""
    b, place = len(gradients[0]), lines.place
    n = len(place)
    # the transpose of a rotation is the rotation back
    factors = None if rotation is None else (rotation[0, :n, None], -rotation[1, :n, None])
    parts = []
    for of_text, of_lines in zip(gradients[:3], gradients[3:], strict=True):
        part = _turned(of_lines.transpose(1, 2).unflatten(0, (b, -1)).flatten(1, 2), place, factors)
        known = of_text.shape[2]  # k and v of text alone are in the first call
        own = _turned(of_text.transpose(1, 2), place.clamp_max(known - 1), factors)
        part = part + (own if known > n else torch.where(place[:, None, None] < known, own, 0))
        parts.append(part.to(of_text.dtype))
    return torch.stack(parts, dim=2).flatten(2)


@fused
def _joined(*calls: Tensor, lines: AxialLines, for_backward: bool) -> tuple[Tensor, ...]:
    """Join both calls: the result (b, n, heads * dim_head); for backward by place too, and both calls' log-sum-exps.

    Text attends to text alone: there the second call's log-sum-exp is infinite, and its part of the gradient 0.
    """
    (text_out, text_norm, line_out, line_norm), side = calls, lines.side
    a, in_text = (x.transpose(1, 2) for x in (text_out, text_norm))
    c, in_line = (x.transpose(1, 2).unflatten(0, (len(text_out), -1)).flatten(1, 2) for x in (line_out, line_norm))
    is_image = torch.arange(len(lines.position), device=a.device) >= lines.before * side
    if not for_backward:
        a, in_text, c, in_line = (x[:, lines.place] for x in (a, in_text, c, in_line))
        is_image = is_image[lines.place]
    norm = torch.where(is_image[:, None], torch.logaddexp(in_text, in_line), in_text)
    own = torch.where(is_image[:, None], (in_line - norm).exp(), 0.0)[..., None]
    out = (a * (in_text - norm).exp()[..., None] + c * own).to(a.dtype)
    if not for_backward:
        return (out.flatten(2),)
    for_lines = torch.where(is_image[:, None], norm, torch.inf).unflatten(1, (-1, side)).flatten(0, 1)
    by_line = out.unflatten(1, (-1, side))
    return out[:, lines.place].flatten(2), by_line, *(x.transpose(1, 2).contiguous() for x in (norm, for_lines))


def _turned(x: Tensor, at: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """x (b, m, ..., dim_head) at ``at`` (n,), its neighbouring pairs rotated by cos and sin (rotary.rotary_factors)."""
    if rotation is None:
        return x[:, at]
    cos, sin = rotation
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x[:, at].to(cos.dtype) * cos + swapped[:, at].to(cos.dtype) * sin

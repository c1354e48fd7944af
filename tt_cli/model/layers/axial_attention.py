"""Axial attention by a GPU's fused kernels: scores are never in memory.

Text attends to text in one call of a fused kernel. An image position's softmax runs over the text and over its own
line, a row or a column: that is two calls, all places over the text and each line over itself, whose log-sum-exps join
their results as in ring attention (Liu et al. 2023, arXiv:2310.01889); given the joined result and log-sum-exp, the
backward kernel of each call gives its exact part of the gradient, for it needs no more of the softmax (Dao et al. 2022,
arXiv:2205.14135).

Queries, keys and values are kept as those of the text, (b, text, heads, dim_head), and as the lines of the image,
(b, side, side, heads, dim_head). So a line is an example of the last call and nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.fused import fused

_ALIGNED = 32  # queries that the kernel pads log-sum-exps to
_FLASH_KEYS = 128  # from which flash attention serves: it was faster for 257, slower for 32
DEVICES = {"cuda"}  # that have the kernels
Tensors = Sequence[Tensor]
# q, k, v (batch, heads, places, dim_head); is it causal; result, log-sum-exp, what else its backward kernel takes
Call = tuple[Tensors, bool, Tensors]


class AxialLines(NamedTuple):
    """Lines of ``side`` places for an image after ``text`` positions; where which position is."""

    text: int
    side: int
    position: Tensor  # of each place, (side * side,); -1 for one after the last position
    place: Tensor  # of each image position, (n - text,)
    rotation: Tensor  # rotary.rotary_factors


@lru_cache(maxsize=16)
def lines_of(kind: str, config: DalleConfig, n: int, rotation: Tensor) -> AxialLines:
    """The lines of n positions for attention of this kind, where ``rotation`` is."""
    text, side, device = config.text_positions, config.image_size, rotation.device
    places = torch.arange(side * side, device="cpu")
    turned = places % side * side + places // side if kind == "axial_col" else places
    position = torch.where(turned < n - text, text + turned, -1)
    return AxialLines(text, side, position.to(device), turned[: n - text].to(device), rotation)


def is_served(kind: str, side: int, dim_head: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether attention of this kind runs here, else by `AttentionPattern.attend`."""
    fits = kind != "conv_like" and side % _ALIGNED == 0 and dim_head % 8 == 0
    return fits and device.type in DEVICES and dtype != torch.float64


def attend(rotated: Tensors, lines: AxialLines) -> Tensor:
    """Attend with what `to_lines` gives: (b, n, heads * dim_head)."""
    return _joined(*_results(_calls(*rotated)), lines=lines, for_backward=False)[0]


def attend_with_gradient(rotated: Tensors, lines: AxialLines, grad: Tensor) -> tuple[Tensor, Tensors]:
    """`attend` again; gradients of q, k, v of all calls, for `from_lines`, from that of the result."""
    text, image, line = calls = _calls(*rotated)
    own, *others = _results(calls)
    attended, out, norm, norm_by_line = _joined(own, *others, lines=lines, for_backward=True)
    pair = [spread(grad, lines, own.shape[1]), out]
    of_text = grad[:, : lines.text].unflatten(2, (own.shape[1], -1)).transpose(1, 2)
    found = _backward(text, [of_text, own], text[2][1])
    found += _backward(image, [x.flatten(1, 2).transpose(1, 2) for x in pair], norm)
    by_line = _backward(line, [x.flatten(0, 1).transpose(1, 2) for x in pair], norm_by_line.flatten(0, 1))
    return attended, found + [x.unflatten(0, (len(grad), -1)) for x in by_line]


def _calls(text: Tensor, image: Tensor) -> tuple[Call, Call, Call]:
    """Text over itself, the image's places over the text, and each line over itself, an example of b * lines."""
    q, k, v = (x.transpose(1, 2) for x in text.unbind())
    queries = image[0].flatten(1, 2).transpose(1, 2)
    by_line = [x.flatten(0, 1).transpose(1, 2) for x in image.unbind()]
    return _forward([q, k, v], True), _forward([queries, k, v], False), _forward(by_line, True)


def _results(calls: tuple[Call, Call, Call]) -> list[Tensor]:
    """Arguments of `_joined`; those of lines by example, (b, lines, ...)."""
    (own, *_), over, line = (results for _, _, results in calls)
    return [own, *over[:2], *(x.unflatten(0, (len(own), -1)) for x in line[:2])]


def _forward(qkv: Tensors, causal: bool) -> Call:
    aten = torch.ops.aten
    if qkv[0].device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal)
    elif _is_flash(qkv[1]):
        found = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal)
    else:
        found = aten._scaled_dot_product_efficient_attention(*qkv, None, True, 0.0, causal)
    return qkv, causal, found[:8]


def _backward(call: Call, pair: Tensors, norm: Tensor) -> list[Tensor]:
    """Gradients of q, k, v; pair: the joined result's gradient and that result; norm: its log-sum-exp."""
    aten, (qkv, causal, (_, _, *rest)), (grad, out) = torch.ops.aten, call, pair
    if grad.device.type == "cpu":
        return list(aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *qkv, out, norm, 0.0, causal))
    if _is_flash(qkv[1]):
        given = *rest[:4], 0.0, causal, *rest[4:]
        return list(aten._scaled_dot_product_flash_attention_backward(grad, *qkv, out, norm, *given))
    given = *rest, 0.0, [True, True, True, False], causal
    return list(aten._scaled_dot_product_efficient_attention_backward(grad, *qkv, None, out, norm, *given)[:3])


def _is_flash(keys: Tensor) -> bool:
    """Tell whether attention over these keys is flash attention: in half precision on CUDA's GPUs from Ampere on."""
    is_long = keys.dtype.itemsize == 2 and keys.shape[2] >= _FLASH_KEYS
    return is_long and torch.version.hip is None and torch.cuda.get_device_capability(keys.device) >= (8, 0)


@fused
def to_lines(projected: Tensor, lines: AxialLines, heads: int) -> tuple[Tensor, Tensor]:
    """Split a fused projection (b, n, 3 * heads * dim_head) and rotate: q, k, v of text and of padded lines."""
    split, known = projected.unflatten(2, (3, heads, -1)), lines.text
    position, rotation = lines.position.clamp_min(0), lines.rotation[:, :, None, None]
    own = _turned(split[:, :known], *rotation[:, :known]).to(projected.dtype).permute(2, 0, 1, 3, 4)
    turned = torch.where(
        lines.position[:, None, None, None] < 0, 0, _turned(split[:, position], *rotation[:, position])
    )
    by_line = turned.to(projected.dtype).permute(2, 0, 1, 3, 4).unflatten(2, (-1, lines.side))
    return own.contiguous(), by_line.contiguous()


@fused
def spread(grad: Tensor, lines: AxialLines, heads: int) -> Tensor:
    """The image's (b, n, heads * dim_head) as (b, lines, side, heads, dim_head), 0 where there is no position."""
    taken = torch.where(lines.position[:, None] < 0, 0, grad[:, lines.position.clamp_min(0)])
    return taken.unflatten(2, (heads, -1)).unflatten(1, (-1, lines.side))


@fused
def from_lines(*gradients: Tensor, lines: AxialLines) -> Tensor:
    """The gradient (b, n, 3 * heads * dim_head) of what `to_lines` split, from all calls' gradients of q, k, v."""
    known, n, dtype = lines.text, lines.text + len(lines.place), gradients[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    own, over = ([x.transpose(1, 2).to(wide) for x in gradients[i : i + 3]] for i in (0, 3))
    image = [x.transpose(2, 3).flatten(1, 2)[:, lines.place].to(wide) for x in gradients[6:]]
    text = own[0], own[1] + over[1], own[2] + over[2]
    image[0] = image[0] + over[0][:, lines.place]
    cos, sin = lines.rotation[:, :n, None]  # whose transpose, the rotation back, has -sin
    parts = []
    for x, y in zip(text, image, strict=True):
        turned = _turned(x, cos[:known], -sin[:known]), _turned(y, cos[known:], -sin[known:])
        parts.append(torch.cat([half.to(dtype) for half in turned], dim=1))
    return torch.stack(parts, dim=2).flatten(2)


@fused
def _joined(own: Tensor, *calls: Tensor, lines: AxialLines, for_backward: bool) -> tuple[Tensor, ...]:
    """The result (b, n, heads * dim_head); for backward the image's by line, log-sum-exps by place and by line too."""
    over, in_text, line, in_line = calls
    a, in_text = over.transpose(1, 2), in_text.transpose(1, 2)
    c, in_line = (x.transpose(2, 3).flatten(1, 2) for x in (line, in_line))
    norm = torch.logaddexp(in_text, in_line)
    out = (a * (in_text - norm).exp()[..., None] + c * (in_line - norm).exp()[..., None]).to(a.dtype)
    attended = torch.cat([own.transpose(1, 2), out[:, lines.place]], dim=1).flatten(2)
    if not for_backward:
        return (attended,)
    by_line = out.unflatten(1, (-1, lines.side)), norm.unflatten(1, (-1, lines.side)).transpose(2, 3).contiguous()
    return attended, by_line[0], norm.transpose(1, 2).contiguous(), by_line[1]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (b, m, ..., dim_head), its neighbouring pairs rotated."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.to(cos.dtype) * cos + swapped.to(cos.dtype) * sin

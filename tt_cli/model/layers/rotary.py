"""Rotary position embedding over text position, image row and image column, applied to q, k AND v.

The angles follow rotary-embedding-torch 0.1.2 as the paper's model used it: "lang" frequencies for the text
position, "pixel" frequencies for row and column; channels are rotated in neighbouring pairs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tt_cli.model.dalle_config import DalleConfig

# Where the image lies on the text axis and the text on both image axes (dalle-pytorch's choice).
_IMAGE_TEXT_POSITION = 8192.0
_TEXT_IMAGE_POSITION = -10.0


def rotary_angles(dim_head: int, text_positions: int, image_size: int) -> Tensor:
    """Angles in radians, float32 on the CPU: (text_positions + image_size**2, 3 * (dim_head // 3 // 2)).

    Columns are text, row and column frequencies in this order; each angle turns one pair of channels. The
    arithmetic is float32 on purpose: 8192 * w has a rounding of 5e-4 that belongs to the trained model.
    """
    rotated = dim_head // 3
    count = rotated // 2
    cpu = torch.device("cpu")
    exponent = torch.arange(0, 2 * count, 2, dtype=torch.float32, device=cpu) / rotated
    language = 1.0 / (10000**exponent)
    pixel = torch.linspace(1.0, 5.0, count, dtype=torch.float32, device=cpu) * math.pi
    line = torch.linspace(-1.0, 1.0, image_size, dtype=torch.float32, device=cpu)
    outside = torch.full((text_positions,), _TEXT_IMAGE_POSITION, device=cpu)
    text = torch.cat(
        [
            torch.arange(text_positions, dtype=torch.float32, device=cpu),
            torch.full((image_size**2,), _IMAGE_TEXT_POSITION, device=cpu),
        ]
    )
    row = torch.cat([outside, line.repeat_interleave(image_size)])
    column = torch.cat([outside, line.repeat(image_size)])
    return torch.cat([text[:, None] * language, row[:, None] * pixel, column[:, None] * pixel], dim=1)


@lru_cache(maxsize=16)
def rotary_table(config: DalleConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """cos + i sin of every angle, (positions, dim_head // 2) complex; channels that are not rotated hold 1.

    complex128 for activations of float64, complex64 for every other dtype. No module holds it: a table must not follow
    the model to half precision, nor into a checkpoint.
    """
    angles = rotary_angles(config.dim_head, config.text_positions, config.image_size) * config.rotary
    angles = angles.to(torch.float64 if dtype == torch.float64 else torch.float32)
    angles = torch.nn.functional.pad(angles, (0, config.dim_head // 2 - angles.shape[1]))
    return torch.polar(torch.ones_like(angles), angles).to(device)


@lru_cache(maxsize=16)
def rotary_factors(config: DalleConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`rotary_table` as real numbers, (2, positions, dim_head): x turns to x * cos + x with its pairs swapped * sin."""
    table = rotary_table(config, device, dtype)
    return torch.stack([table.real.repeat_interleave(2, 1), torch.stack([-table.imag, table.imag], -1).flatten(1)])


class SplitHeads(torch.autograd.Function):
    """Split a fused projection (b, n, 3 * heads * dim_head) and rotate q, k and v by their positions' angles.

    ``table`` is (n or more, dim_head // 2) complex. Gives (3, b, heads, padded, dim_head) in one pass over memory;
    positions n..padded are zero.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, table: Tensor, heads: int, padded: int) -> Tensor:
        b, n, width = qkv.shape
        dim_head = width // (3 * heads)
        ctx.table, ctx.length = table, n
        out = qkv.new_empty(3, b, heads, padded, dim_head)
        if padded > n:
            out[:, :, :, n:].zero_()
        _rotate(qkv.view(b, n, 3, heads, dim_head).permute(2, 0, 3, 1, 4), table[:n], out[:, :, :, :n])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return joined_heads(grad, ctx.table, ctx.length), None, None, None


def joined_heads(grad: Tensor, table: Tensor, n: int) -> Tensor:
    """The gradient (b, n, 3 * heads * dim_head) of what ``SplitHeads`` split, from that of its result."""
    _, b, heads, _, dim_head = grad.shape
    out = grad.new_empty(b, n, 3, heads, dim_head)
    # The transpose of a rotation is the rotation back.
    _rotate(grad[:, :, :, :n], table[:n].conj(), out.permute(2, 0, 3, 1, 4))
    return out.view(b, n, 3 * heads * dim_head)


def _rotate(source: Tensor, table: Tensor, target: Tensor) -> None:
    """Write the rotated source (..., n, dim_head) into target; table (n, dim_head // 2) complex."""
    if source.dtype in (torch.float32, torch.float64):
        torch.mul(_as_complex(source), table, out=_as_complex(target))
    else:  # half precision: the products are computed in float32
        target.copy_(torch.view_as_real(_as_complex(source.float()) * table).flatten(-2))


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))

"""Token shift: a part of every position's channels comes from its neighbours (RWKV's author, BlinkDL).

Text positions take the first half of their channels from the position before. Image positions take the first
quarter from the position above and the second quarter from the position to the left, never across an edge.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def shifted(h: Tensor, text_positions: int, image_size: int, dtype: torch.dtype) -> Tensor:
    """Shift h (b, n, d), d a multiple of 4, the start token and text first, then image codes in raster order."""
    n, d = h.shape[1:]
    t, s, half, quarter = min(text_positions, n), image_size, d // 2, d // 4
    out = torch.empty_like(h, dtype=dtype)
    out[:, :, half:] = h[:, :, half:]
    out[:, 1:t, :half] = h[:, : t - 1, :half]
    out[:, 0, :half] = 0
    if n > t:
        out[:, t : t + s, :quarter] = 0
        out[:, t + s :, :quarter] = h[:, t : max(t, n - s), :quarter]
        out[:, t + 1 :, quarter:half] = h[:, t : n - 1, quarter:half]
        out[:, t::s, quarter:half] = 0
    return out


def unshifted(grad: Tensor, text_positions: int, image_size: int, dtype: torch.dtype) -> Tensor:
    """The gradient of h from that of ``shifted(h)``, in ``dtype``: every channel goes back where it came from."""
    n, d = grad.shape[1:]
    t, s, half, quarter = min(text_positions, n), image_size, d // 2, d // 4
    out = torch.empty_like(grad, dtype=dtype)
    out[:, :, half:] = grad[:, :, half:]
    out[:, : t - 1, :half] = grad[:, 1:t, :half]
    out[:, t - 1, :half] = 0
    if n > t:
        last = max(t, n - s)
        out[:, t:last, :quarter] = grad[:, t + s :, :quarter]
        out[:, last:, :quarter] = 0
        out[:, t : n - 1, quarter:half] = grad[:, t + 1 :, quarter:half]
        out[:, n - 1, quarter:half] = 0
        out[:, t + s - 1 :: s, quarter:half] = 0
    return out


@lru_cache(maxsize=16)
def sources(n: int, text_positions: int, image_size: int, sign: int, device: torch.device) -> Tensor:
    """Positions (n, 4) from which `shifted` (sign 1) or `unshifted` (-1) takes each quarter of a position's channels.

    -1 where it takes none.
    """
    t, s = text_positions, image_size
    position, quarter = torch.arange(n, device="cpu")[:, None], torch.arange(4, device="cpu")
    is_text, column = position < t, (position - t) % s
    source = position - sign * torch.where(quarter > 1, 0, torch.where(is_text | (quarter == 1), 1, s))
    in_row = (column != (0 if sign > 0 else s - 1)) | (quarter != 1)
    taken = torch.where(is_text, (source >= 0) & (source < min(t, n)), (source >= t) & (source < n) & in_row)
    return torch.where(taken | (quarter > 1), source, -1).to(device)


class ShiftTokens(torch.autograd.Function):
    """`shifted` in h's dtype, for autograd."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, text_positions: int, image_size: int) -> Tensor:
        ctx.sizes = text_positions, image_size
        return shifted(h, text_positions, image_size, h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        text_positions, image_size = ctx.sizes
        return unshifted(grad, text_positions, image_size, grad.dtype), None, None

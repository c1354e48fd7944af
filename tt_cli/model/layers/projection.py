"""A weight matrix made ready for many products with few rows each, as drawing code by code needs them.

Such products are as fast as the weights can be read. torch's default BLAS on CPUs reads a (n, k) matrix for few rows
at a half to a fifth of the memory's speed; oneDNN, with the matrix laid out for it once, comes close to it (AMD Zen 4,
two cores, float32, the paper's sizes: 15 -> 40 GB/s for 1 row, 54 -> 168 GFLOP/s for 16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tt_cli.model.layers.products import has_onednn_linear, linear


class Projection:
    """x (rows, k) -> x W^T + b, (rows, n), in ``dtype``; takes a copy of the weights where that is faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> None:
        """weight (n, k), bias (n,) in any dtype; ``rows`` is what the layout is chosen for, others work too."""
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        if is_packed(weight.device, dtype, rows):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x in ``dtype``."""
        return linear(x, self.weight, self.bias)


def copied_bytes(weights: int, weight_dtype: torch.dtype, device: torch.device, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the copies that projections of ``weights`` values in all take beside the model's own."""
    return weights * dtype.itemsize if is_packed(device, dtype, rows) or dtype != weight_dtype else 0


def is_packed(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """True where oneDNN's own layout is worth a copy: a single float32 row is read as fast without."""
    return device.type == "cpu" and has_onednn_linear(dtype) and (rows > 1 or dtype != torch.float32)


def drawing_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype of matrix products and caches in drawing, and why.

    bfloat16 where a GPU has units for it: twice the speed and half the memory, and sums, norms and the residual
    stream stay in float32. On CPUs float32, so that a seed gives the pictures of the slow way.
    """
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if major >= 8:
            return torch.bfloat16, f"the GPU multiplies bfloat16 (compute capability {major}.x)"
        return torch.float32, f"the GPU has no bfloat16 units (compute capability {major}.x, from 8.x on)"
    return torch.float32, "a CPU draws exactly"

"""Matrix products without autograd, for gradients written by hand: the fastest that the device has.

Half-precision products are summed in float32 by every backend. On CPUs oneDNN's float32 product is about a tenth
faster than the BLAS that torch calls by default (AMD Zen 4: 212 against 190 GFLOP/s on two cores), and in bfloat16
it adds the bias without a pass of its own.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 21
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # nor where one product is cut up
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (m, k) weight (n, k)^T + bias (n,): (m, n)."""
    if _onednn_is_faster(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (m, n) weight (n, k): (m, k)."""
    return linear(x, weight.t()) if _onednn_is_faster(x) else torch.mm(x, weight)


def add_product_(total: Tensor, a: Tensor, b: Tensor, unit: Tensor | None = None) -> None:
    """total (n, k) += unit * a (m, n)^T b (m, k); total may be wider than a and b, unit is a scalar or absent."""
    if total.dtype == a.dtype and unit is None:
        total.addmm_(a.t(), b)
        return
    if total.is_cuda and sums_wide(total.device, a.dtype, total.dtype):
        if unit is None:
            torch.ops.aten.addmm.dtype_out(total, a.t(), b, total.dtype, out=total)
        else:
            total.addcmul_(torch.ops.aten.mm.dtype(a.t(), b, total.dtype), unit)
        return
    # On a CPU in blocks: one that is widened must not be taken from the system anew each time (see blocks.py).
    size = len(total) if total.device.type != "cpu" else max(1, _BLOCK_ELEMENTS // total.shape[1])
    for rows, columns in zip(total.split(size), a.split(size, dim=1), strict=True):
        piece = torch.mm(columns.t(), b)
        if unit is None:
            rows.add_(piece)
        else:
            rows.addcmul_(piece.to(rows.dtype), unit)


@cache
def sums_wide(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """True where the device's BLAS adds to a wide sum itself: some torch has the operators, and refuses it."""
    a, total = torch.ones(16, 16, dtype=narrow, device=device), torch.zeros(16, 16, dtype=wide, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, torch.ops.aten.mm.dtype(a, a, wide).to(narrow), a, wide, out=total)
    except (AttributeError, RuntimeError):
        return False
    return True


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of x (m, n): (n,). On a GPU a product with ones: torch's sum takes twice x's bytes."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return torch.mv(x.t(), torch.ones(len(x), dtype=x.dtype, device=x.device))
    return x.sum(dim=0)


def _onednn_is_faster(x: Tensor) -> bool:
    return x.device.type == "cpu" and has_onednn_linear(x.dtype)


@cache
def has_onednn_linear(dtype: torch.dtype) -> bool:
    """True if torch's own (undocumented) oneDNN linear is here for ``dtype`` and gives what F.linear gives."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    x, weight, bias = torch.ones(2, 3, dtype=dtype), torch.eye(4, 3, dtype=dtype), torch.ones(4, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        plain, found = (torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "") for w in (weight, packed))
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = F.linear(x, weight, bias)
    return torch.equal(plain, expected) and torch.equal(found, expected)

"""Sums whose last bit does not depend on the processor.

`torch.sum` adds in an order that follows the vector width and the number of threads. Here every block of
4096 elements is squared in float64 (exact: 24 + 24 bits fit into 53), folded in halves (element i and
element i + half), and the blocks' sums are added one after the other. Only elementwise additions remain, and
IEEE 754 fixes the result of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUM_BLOCK = 4096


class SquareSum:
    """Sum of squares of fp32 vectors of up to `capacity` elements; one buffer of 8 bytes per element."""

    def __init__(self, capacity: int) -> None:
        self._buffer = torch.empty(-(-capacity // SUM_BLOCK) * SUM_BLOCK, dtype=torch.float64)

    def blocks(self, values: Tensor) -> list[float]:
        """Sums of squares of the blocks of `values` (n,) fp32, n <= capacity; zeros pad the last block."""
        count = values.numel()
        block_count = -(-count // SUM_BLOCK)
        buffer = self._buffer[: block_count * SUM_BLOCK]
        buffer[:count].copy_(values)
        buffer[count:].zero_()
        buffer.mul_(buffer)
        rows = buffer.view(block_count, SUM_BLOCK)
        half = SUM_BLOCK // 2
        while half:
            rows[:, :half].add_(rows[:, half : 2 * half])
            half //= 2
        sums: list[float] = rows[:, 0].tolist()
        return sums


def add_in_order(total: float, values: list[float]) -> float:
    """`total` plus `values`, left to right; the built-in `sum` compensates for rounding since Python 3.12."""
    for value in values:
        total += value
    return total

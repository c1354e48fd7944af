# mypy: disable-error-code="untyped-decorator"
"""CenteredClip's medians and products in compiled loops; needs numba. Gives the bytes of `PortableClip`.

Notable:
- some columns at a time, so that what is sorted stays in the fastest cache;
- a value and its votes are one whole number: sorting them is minima and maxima alone, without branches;
- signatures are given, so importing this module compiles everything or loads it from disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from tt_cli.swarm.allreduce.clipping.clip_kernels import BLOCK, LANES, PortableClip, exchanges

OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
ROWS = types.Array(types.float32, 2, "C")
VALUES = types.Array(types.float32, 1, "C")
WHOLE = types.Array(types.int64, 1, "C")
PAIRS = types.Array(types.int64, 2, "C")
SUMS = types.Array(types.float64, 2, "C")
COLUMNS = 64


@njit(types.void(ROWS, WHOLE, PAIRS, VALUES), **OPTIONS)
def _median(rows, votes, pairs, out):  # type: ignore[no-untyped-def]
    members, elements = rows.shape
    bits = rows.view(np.int32)
    total = np.int32(0)
    for i in range(members):
        total += np.int32(votes[i])
    keys = np.empty((members, COLUMNS), np.int64)
    passed = np.empty(COLUMNS, np.int32)  # twice the votes so far
    low = np.empty(COLUMNS, np.int32)
    high = np.empty(COLUMNS, np.int32)
    one = np.empty(2, np.int32)
    floats = one.view(np.float32)
    for start in range(0, elements, COLUMNS):
        size = min(COLUMNS, elements - start)
        for i in range(members):
            here, row, vote = keys[i], bits[i, start : start + size], votes[i]
            for k in range(size):
                here[k] = (np.int64(row[k] ^ ((row[k] >> np.int32(31)) & np.int32(0x7FFFFFFF))) << 16) | vote
        for pair in range(len(pairs)):
            a, b = keys[pairs[pair, 0]], keys[pairs[pair, 1]]
            for k in range(COLUMNS):
                smaller, larger = min(a[k], b[k]), max(a[k], b[k])
                a[k] = smaller
                b[k] = larger
        passed[:] = 0
        for i in range(members):
            here = keys[i]
            for k in range(size):
                before, value = passed[k], np.int32(here[k] >> 16)
                after = np.int32(before + 2 * np.int32(here[k] & 0xFFFF))
                low[k] = value if before < total else low[k]
                high[k] = value if before <= total else high[k]
                passed[k] = after
        for k in range(size):
            one[0] = low[k] ^ ((low[k] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            one[1] = high[k] ^ ((high[k] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            out[start + k] = ((floats[0] + np.float32(0)) + (floats[1] + np.float32(0))) * np.float32(0.5)


@njit(types.float64(VALUES, VALUES), **OPTIONS)
def _product(one, other):  # type: ignore[no-untyped-def]
    lanes = np.zeros(LANES)
    for start in range(0, len(one), LANES):
        size = min(LANES, len(one) - start)
        here, there = one[start : start + size], other[start : start + size]
        for k in range(size):
            lanes[k] += np.float64(here[k]) * np.float64(there[k])
    half = LANES // 2
    while half:
        for k in range(half):
            lanes[k] += lanes[half + k]
        half //= 2
    return lanes[0]


@njit(types.void(ROWS, VALUES, SUMS), **OPTIONS)
def _add_products(rows, centre, gram):  # type: ignore[no-untyped-def]
    members, elements = rows.shape
    block = np.empty((members + 1, BLOCK), np.float32)
    for start in range(0, elements, BLOCK):
        size = min(BLOCK, elements - start)
        for k in range(size):
            block[members, k] = centre[start + k]
        for i in range(members):
            for k in range(size):
                block[i, k] = rows[i, start + k] - centre[start + k]
        for i in range(members + 1):
            for j in range(i, members + 1):
                gram[i, j] += _product(block[i, :size], block[j, :size])


class NumbaClip(PortableClip):
    """The same with numba."""

    def median(self, rows: np.ndarray, votes: np.ndarray, out: np.ndarray) -> None:
        pairs = np.array(exchanges(len(rows)), np.int64).reshape(-1, 2)
        _median(rows, votes, pairs, out)

    def add_products(self, rows: np.ndarray, centre: np.ndarray, gram: np.ndarray) -> None:
        _add_products(rows, centre, gram)

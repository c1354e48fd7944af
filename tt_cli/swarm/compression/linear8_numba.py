# mypy: disable-error-code="untyped-decorator"
"""linear8 in compiled loops, one pass over the elements; needs numba. Gives the bytes of `PortableLinear8`.

Notable:
- the same fp32 operations on each element, nothing fused or reordered (numba does neither unless asked to);
- rounding to nearest even is one addition: next to 1.5 * 2^23 the numbers of fp32 are whole, and the low byte of their
  bits is the signed byte;
- a largest magnitude is taken of the bits: that of floats is not vectorised, because NaN has no place in the order;
- signatures are given, so importing this module compiles everything or loads it from disk: nothing is left for later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types

from tt_cli.swarm.compression.linear8 import BLOCK, LARGEST, SMALLEST, PortableLinear8

OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
VALUES = types.Array(types.float32, 1, "C")
ROOM = types.Array(types.uint8, 1, "C")
RECEIVED = types.Array(types.uint8, 1, "C", readonly=True)  # bytes of a message; an array that is not does as well
MOST = int(LARGEST.view(np.int32))  # bits of the largest magnitude that is encoded
LEAST = int(SMALLEST.view(np.int32))
WHOLE = np.float32(1.5 * 2**23)


@njit(types.boolean(VALUES, ROOM), **OPTIONS)
def _encode(values, out):  # type: ignore[no-untyped-def]
    count = (values.size + BLOCK - 1) // BLOCK
    bits = values.view(np.int32)
    one = np.empty(1, np.int32)
    work = np.empty(BLOCK, np.float32)
    rounded = work.view(np.int32)
    for block in range(count):
        start = block * BLOCK
        size = min(BLOCK, values.size - start)
        here = bits[start : start + size]
        highest = np.int32(LEAST)
        for i in range(size):
            highest = max(highest, here[i] & np.int32(0x7FFFFFFF))
        if highest > np.int32(MOST):  # the bits of NaN and infinity are above all others
            return False
        one[0] = highest
        one.view(np.float32)[0] = one.view(np.float32)[0] / np.float32(127)
        upper = (one[0] + np.int32(0xFFFF)) >> np.int32(16)
        out[2 * block] = np.uint8(upper & np.int32(0xFF))
        out[2 * block + 1] = np.uint8(upper >> np.int32(8))
        one[0] = upper << np.int32(16)
        factor = np.float32(1) / one.view(np.float32)[0]
        plain = values[start : start + size]
        for i in range(size):
            work[i] = plain[i] * factor + WHOLE
        coded = out[2 * count + start : 2 * count + start + size]
        for i in range(size):
            coded[i] = np.uint8(rounded[i] & np.int32(0xFF))
    return True


@njit(types.void(RECEIVED, VALUES, types.boolean, types.float32), **OPTIONS)
def _decode(received, out, adding, weight):  # type: ignore[no-untyped-def]
    count = (out.size + BLOCK - 1) // BLOCK
    one = np.empty(1, np.int32)
    for block in range(count):
        start = block * BLOCK
        size = min(BLOCK, out.size - start)
        one[0] = np.int32(received[2 * block]) << np.int32(16) | np.int32(received[2 * block + 1]) << np.int32(24)
        scale = one.view(np.float32)[0]
        coded = received[2 * count + start : 2 * count + start + size]
        here = out[start : start + size]
        if adding:
            for i in range(size):
                here[i] = here[i] + (np.float32(np.int8(coded[i])) * scale) * weight
        else:
            for i in range(size):
                here[i] = np.float32(np.int8(coded[i])) * scale


class NumbaLinear8(PortableLinear8):
    """The same with numba. It holds nothing: any number of threads may use it at once."""

    def encode(self, values: torch.Tensor, out: np.ndarray) -> bool:
        return bool(_encode(values.numpy(), out))

    def decode(self, coded: np.ndarray, out: torch.Tensor) -> None:
        _decode(coded, out.numpy(), False, np.float32(0))

    def add(self, coded: np.ndarray, accumulator: torch.Tensor, weight: np.float32) -> None:
        _decode(coded, accumulator.numpy(), True, weight)

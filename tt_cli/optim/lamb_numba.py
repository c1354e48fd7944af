# mypy: disable-error-code="untyped-decorator"
"""The arithmetic of a LAMB step in compiled loops over blocks that stay in the processor's cache; needs numba.

Gives the bytes of `PortableLamb`: the same IEEE operations on each element in the same order, nothing fused or
reordered (numba does neither unless asked to), and the sums of `sums.py` with their order of additions.

Notable:
- one loop does one thing to two or three arrays: longer loops are not vectorised;
- codes are computed from `Parts`, not looked up, for the same reason;
- a largest magnitude is taken of the bits: that of floats is not vectorised, because NaN has no place in the order;
- signatures are given, so importing this module compiles everything or loads it from disk: nothing is left for later.
"""

from __future__ import annotations

from typing import Any

import numpy
from numba import njit, types
from torch import Tensor

from tt_cli.optim.blockwise import LEAST_SQUARE, LambStep, Moment, PlainMoment, dynamic_map, parts
from tt_cli.optim.sums import SUM_BLOCK

OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
F, I, B, D = (  # noqa: E741
    types.Array(kind, 1, "C") for kind in (types.float32, types.int32, types.uint8, types.float64)
)
TABLE = types.Array(types.float32, 2, "C")


@njit(types.void(F, B, types.float32, F), **OPTIONS)
def _decode(values, codes, absmax, out):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        out[i] = values[codes[i]] * absmax


@njit(types.float32(F), **OPTIONS)
def _absmax(x):  # type: ignore[no-untyped-def]
    bits = x.view(numpy.int32)
    largest = numpy.zeros(1, numpy.int32)
    highest = numpy.int32(0)
    for i in range(bits.size):
        highest = max(highest, bits[i] & numpy.int32(0x7FFFFFFF))
    largest[0] = highest
    return largest.view(numpy.float32)[0]


@njit(types.void(F, types.float32, TABLE, I), **OPTIONS)
def _parts(x, absmax, decades, out):  # type: ignore[no-untyped-def]
    """`Parts.part` of |x| / absmax: the slope, offset and last part of the last limit that is not above."""
    limits, slopes, offsets, lasts = decades[0], decades[1], decades[2], decades[3]
    # tuples, whose elements stay in registers
    limit = limits[0], limits[1], limits[2], limits[3], limits[4], limits[5], limits[6], limits[7]
    slope = slopes[0], slopes[1], slopes[2], slopes[3], slopes[4], slopes[5], slopes[6], slopes[7]
    offset = offsets[0], offsets[1], offsets[2], offsets[3], offsets[4], offsets[5], offsets[6], offsets[7]
    last = lasts[0], lasts[1], lasts[2], lasts[3], lasts[4], lasts[5], lasts[6], lasts[7]
    for i in range(x.size):
        y = abs(x[i] / absmax)
        a = b = c = numpy.float32(0)
        for decade in range(8):
            above = y >= limit[decade]
            a = slope[decade] if above else a
            b = offset[decade] if above else b
            c = last[decade] if above else c
        out[i] = numpy.int32(min(y * a + b, c))


@njit(types.void(I, B), **OPTIONS)
def _unsigned_codes(part, codes):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        codes[i] = numpy.uint8(max(part[i], numpy.int32(LEAST_SQUARE)))


@njit(types.void(F, I, B), **OPTIONS)
def _signed_codes(x, part, codes):  # type: ignore[no-untyped-def]
    """127 is zero; there is a code for 1, none for -1."""
    for i in range(codes.size):
        up = numpy.int32(127) + part[i]
        down = numpy.int32(127) - min(part[i], numpy.int32(127))
        codes[i] = numpy.uint8(down if x[i] < numpy.float32(0) else up)


@njit(types.void(F, F, types.float32, types.float32, types.float32), **OPTIONS)
def _first_moment(g, m, clip, beta, rest):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        m[i] = m[i] * beta + (g[i] * clip) * rest


@njit(types.void(F, F, types.float32, types.float32, types.float32), **OPTIONS)
def _second_moment(g, v, clip, beta, rest):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        clipped = g[i] * clip
        v[i] = v[i] * beta + (clipped * clipped) * rest


@njit(types.void(F, F, F, F, types.float32, types.float32), **OPTIONS)
def _update(m, v, p, u, eps, decay):  # type: ignore[no-untyped-def]
    if decay == numpy.float32(0):
        for i in range(u.size):
            u[i] = m[i] / (numpy.sqrt(v[i]) + eps)
    else:
        for i in range(u.size):
            u[i] = m[i] / (numpy.sqrt(v[i]) + eps) + p[i] * decay


@njit(types.float64(F, types.int64), **OPTIONS)
def _pair(x, i):  # type: ignore[no-untyped-def]
    a, b = numpy.float64(x[i]), numpy.float64(x[i + 2048])
    return a * a + b * b


@njit(types.float64(F, D), **OPTIONS)
def _folded(x, sums):  # type: ignore[no-untyped-def]
    """The sum of squares of 4096 elements, folded in halves; the first four folds of each element at once."""
    for i in range(256):
        even = (_pair(x, i) + _pair(x, i + 1024)) + (_pair(x, i + 512) + _pair(x, i + 1536))
        odd = (_pair(x, i + 256) + _pair(x, i + 1280)) + (_pair(x, i + 768) + _pair(x, i + 1792))
        sums[i] = even + odd
    half = 128
    while half:
        for i in range(half):
            sums[i] += sums[i + half]
        half //= 2
    return sums[0]


@njit(types.float64(F, types.float64, F, D), **OPTIONS)
def _squares(x, total, padded, sums):  # type: ignore[no-untyped-def]
    whole = x.size // 4096 * 4096
    for start in range(0, whole, 4096):
        total += _folded(x[start : start + 4096], sums)
    if whole < x.size:
        padded[: x.size - whole] = x[whole:]
        padded[x.size - whole :] = 0
        total += _folded(padded, sums)
    return total


RATES = types.UniTuple(types.float32, 7)  # of one step: clip, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay
MOMENT = types.Tuple([B, F, F, TABLE])  # in blocks: codes, their scales, the values of codes, and `Parts.table`
TWO_SUMS = types.UniTuple(types.float64, 2)


@njit(TWO_SUMS(F, F, MOMENT, MOMENT, types.int64, RATES), **OPTIONS)
def _blockwise(p, g, first, second, block_size, rates):  # type: ignore[no-untyped-def]
    clip, beta1, rest1, beta2, rest2, eps, decay = rates
    m_codes, m_absmax, m_values, m_decades = first
    v_codes, v_absmax, v_values, v_decades = second
    whole_m, whole_v = numpy.empty(block_size, numpy.float32), numpy.empty(block_size, numpy.float32)
    whole_part = numpy.empty(block_size, numpy.int32)
    padded, sums = numpy.empty(4096, numpy.float32), numpy.empty(256, numpy.float64)
    p_squares = 0.0
    u_squares = 0.0
    span = max(block_size, 4096)
    for outer in range(0, p.size, span):
        end = min(outer + span, p.size)
        for start in range(outer, end, block_size):
            stop = min(start + block_size, end)
            block = start // block_size
            m, v, part = whole_m[: stop - start], whole_v[: stop - start], whole_part[: stop - start]
            _decode(m_values, m_codes[start:stop], m_absmax[block], m)
            _first_moment(g[start:stop], m, clip, beta1, rest1)
            absmax = _absmax(m)
            m_absmax[block] = absmax
            divisor = absmax if absmax > numpy.float32(0) else numpy.float32(1)
            _parts(m, divisor, m_decades, part)
            _signed_codes(m, part, m_codes[start:stop])
            _decode(v_values, v_codes[start:stop], v_absmax[block], v)
            _second_moment(g[start:stop], v, clip, beta2, rest2)
            absmax = _absmax(v)
            v_absmax[block] = absmax
            divisor = absmax if absmax > numpy.float32(0) else numpy.float32(1)
            _parts(v, divisor, v_decades, part)
            _unsigned_codes(part, v_codes[start:stop])
            _update(m, v, p[start:stop], g[start:stop], eps, decay)
        p_squares = _squares(p[outer:end], p_squares, padded, sums)
        u_squares = _squares(g[outer:end], u_squares, padded, sums)
    return p_squares, u_squares


@njit(TWO_SUMS(F, F, F, F, RATES), **OPTIONS)
def _plain(p, g, m, v, rates):  # type: ignore[no-untyped-def]
    clip, beta1, rest1, beta2, rest2, eps, decay = rates
    padded, sums = numpy.empty(4096, numpy.float32), numpy.empty(256, numpy.float64)
    _first_moment(g, m, clip, beta1, rest1)
    _second_moment(g, v, clip, beta2, rest2)
    _update(m, v, p, g, eps, decay)
    p_squares = _squares(p, 0.0, padded, sums)
    return p_squares, _squares(g, 0.0, padded, sums)


@njit(types.void(F, F, types.float32), **OPTIONS)
def _subtract(p, u, scale):  # type: ignore[no-untyped-def]
    for i in range(p.size):
        p[i] = p[i] - u[i] * scale


class NumbaLamb:
    """The kernels with numba, see PortableLamb; a step takes 12 bytes per element of one block."""

    def __init__(self) -> None:
        self._tables = tuple((dynamic_map(signed).numpy(), parts(signed).table) for signed in (True, False))

    def squares(self, values: Tensor, total: float) -> float:
        padded, sums = numpy.empty(SUM_BLOCK, numpy.float32), numpy.empty(256, numpy.float64)
        return float(_squares(values.numpy(), total, padded, sums))

    def moments_and_update(
        self, parameter: Tensor, gradient: Tensor, first: Moment, second: Moment, step: LambStep
    ) -> tuple[float, float]:
        clip, beta1, beta2, eps, decay = step
        rates = tuple(map(numpy.float32, (clip, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay)))
        p, g = parameter.numpy(), gradient.numpy()
        if isinstance(first, PlainMoment) or isinstance(second, PlainMoment):
            assert isinstance(first, PlainMoment) and isinstance(second, PlainMoment)
            sums = _plain(p, g, first.values.numpy(), second.values.numpy(), rates)
        else:
            moments = (
                (moment.codes.numpy(), moment.absmax.numpy(), *tables)
                for moment, tables in zip((first, second), self._tables, strict=True)
            )
            sums = _blockwise(p, g, *moments, first.block_size, rates)
        return float(sums[0]), float(sums[1])

    def subtract(self, parameter: Tensor, update: Tensor, scale: float) -> None:
        _subtract(parameter.numpy(), update.numpy(), numpy.float32(scale))

"""CenteredClip's medians and distances: what the kernels must do, and how numpy does it on every machine."""

from __future__ import annotations

import functools

import numpy as np

COLUMNS = 2048  # that numpy sorts at a time: they stay in the cache
LANES = 1024  # sums at a time, of every so many elements each, that are added by halves in the end


class PortableClip:
    """The arithmetic on contiguous rows (members, elements) fp32, all finite, with numpy, for every machine."""

    def median(self, rows: np.ndarray, votes: np.ndarray, out: np.ndarray) -> None:
        """out (elements,) = the weighted median of each column; where votes are even, half way between two."""
        for start in range(0, rows.shape[1], COLUMNS):
            self._median(rows[:, start : start + COLUMNS], votes, out[start : start + COLUMNS])

    def _median(self, rows: np.ndarray, votes: np.ndarray, out: np.ndarray) -> None:
        bits = rows.view(np.int32)
        keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)  # whole numbers in the order of floats
        keys <<= 16
        keys |= votes[:, None]
        spare = np.empty(rows.shape[1], np.int64)
        for i, j in exchanges(len(rows)):
            np.minimum(keys[i], keys[j], out=spare)
            np.maximum(keys[i], keys[j], out=keys[j])
            keys[i] = spare
        passed = keys & 0xFFFF
        for i in range(1, len(rows)):
            passed[i] += passed[i - 1]
        passed *= 2
        total = int(votes.sum())
        low, high = np.count_nonzero(passed < total, axis=0), np.count_nonzero(passed <= total, axis=0)
        keys >>= 16
        middle = [np.take_along_axis(keys, index[None], axis=0)[0] for index in (low, high)]
        out[:] = (_floats(middle[0]) + _floats(middle[1])) * np.float32(0.5)

    def add_sums(self, rows: np.ndarray, centre: np.ndarray, squares: np.ndarray, products: np.ndarray) -> None:
        """squares, float64 (members, LANES), += the squared distance of each row from `centre`.

        products, float64 (members + 1, LANES), += the product of each row, and of the centre, with it; none if empty.
        What element k adds goes into lane k % LANES.
        """
        for i, row in enumerate(rows):
            difference = (row - centre).astype(np.float64)
            self._add(difference * difference, squares[i])
        for row, lanes in zip((*rows, centre) if len(products) else (), products, strict=True):
            self._add(row.astype(np.float64) * centre, lanes)

    def _add(self, terms: np.ndarray, lanes: np.ndarray) -> None:
        for start in range(0, len(terms), LANES):
            here = terms[start : start + LANES]
            lanes[: len(here)] += here


def _floats(whole: np.ndarray) -> np.ndarray:
    """The fp32 numbers of ordered whole numbers; zero has no sign."""
    bits = whole.astype(np.int32)
    return (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).view(np.float32) + np.float32(0)


@functools.cache
def exchanges(rows: int) -> tuple[tuple[int, int], ...]:
    """Pairs of rows to put in order, one pair after the other, to sort so many (Knuth 5.2.2, algorithm M)."""
    pairs = []
    p = first = 1 << max(0, (rows - 1).bit_length() - 1)
    while p:
        q, r, d = first, 0, p
        while True:
            pairs += [(i, i + d) for i in range(rows - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return tuple(pairs) if rows > 1 else ()

"""CenteredClip's medians and products: what the kernels must do, and how numpy does it on every machine."""

from __future__ import annotations

import functools

import numpy as np

COLUMNS = 2048  # that numpy sorts at a time: they stay in the cache
BLOCK = 2**15  # elements whose products are added up by themselves
LANES = 1024  # sums at a time in a block, of every so many elements each, that are added by halves in the end


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

    def add_products(self, rows: np.ndarray, centre: np.ndarray, gram: np.ndarray) -> None:
        """gram, float64 (members + 1, members + 1), += the products of all rows' differences from `centre`, and of it.

        On and above the diagonal. In a block element k goes into lane k % LANES; blocks are added one after the other.
        """
        for start in range(0, rows.shape[1], BLOCK):
            middle = centre[start : start + BLOCK]
            block = np.vstack((rows[:, start : start + BLOCK] - middle, middle)).astype(np.float64)
            for i, row in enumerate(block):
                for j in range(i, len(block)):
                    gram[i, j] += self._folded(row * block[j])

    @staticmethod
    def _folded(terms: np.ndarray) -> float:
        lanes = np.zeros(LANES)
        for start in range(0, len(terms), LANES):
            here = terms[start : start + LANES]
            lanes[: len(here)] += here
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return float(lanes[0])


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

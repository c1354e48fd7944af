"""A nearest-neighbour test in pixel space: a drawing should look most like the picture it is to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NeighbourScore:
    """The number, of `total` drawings, whose nearest neighbour is their own picture."""

    right: int
    total: int
    nearest: tuple[int, ...]  # for each drawing, the index of its nearest picture

    @property
    def fraction(self) -> float:
        return self.right / self.total if self.total else 0.0


def nearest_neighbour_score(
    drawn: np.ndarray, own: Sequence[int], pictures: np.ndarray, *, chunk: int = 128
) -> NeighbourScore:
    """Compare drawings with all pictures by the L2 distance of their pixels.

    drawn (n, H, W, 3) uint8; own: for each drawing, the index of its picture; pictures (m, H, W, 3) uint8.
    A drawing is right if no picture is closer than its own: of equal pictures any counts. Works on `chunk`
    pictures at a time, in float64, where sums of products of bytes are exact.
    """
    if len(own) != len(drawn) or drawn.shape[1:] != pictures.shape[1:]:
        raise ValueError(f"{drawn.shape} drawings, {len(own)} indices and {pictures.shape} pictures do not fit")
    if not len(drawn):
        return NeighbourScore(0, 0, ())
    flat = drawn.reshape(len(drawn), -1).astype(np.float64)
    squares = (flat * flat).sum(axis=1)[:, None]
    columns = []
    for start in range(0, len(pictures), chunk):
        other = pictures[start : start + chunk]
        other = other.reshape(len(other), -1).astype(np.float64)
        columns.append(squares + (other * other).sum(axis=1) - 2 * (flat @ other.T))
    distances = np.concatenate(columns, axis=1)
    own_distances = distances[np.arange(len(drawn)), list(own)]
    right = int((own_distances <= distances.min(axis=1)).sum())
    return NeighbourScore(right, len(drawn), tuple(distances.argmin(axis=1).tolist()))

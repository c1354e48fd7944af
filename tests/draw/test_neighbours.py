"""The nearest-neighbour score against distances computed one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tt_cli.draw.recall import nearest_neighbour_score


def test_counts_drawings_whose_own_picture_is_nearest() -> None:
    pictures = np.stack([np.full((2, 2, 3), level, np.uint8) for level in (0, 100, 200)])
    drawn = np.stack([np.full((2, 2, 3), level, np.uint8) for level in (40, 120, 140, 255)])
    score = nearest_neighbour_score(drawn, [0, 1, 2, 2], pictures)
    assert (score.right, score.total, score.nearest) == (3, 4, (0, 1, 1, 2))
    assert score.fraction == 0.75


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_agrees_with_distances_one_by_one(chunk: int) -> None:
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    drawn = random.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    own = random.integers(0, 30, 20).tolist()
    nearest = [
        int(np.argmin([np.sum((one.astype(int) - other) ** 2) for other in pictures.astype(int)])) for one in drawn
    ]
    own[:5] = nearest[:5]
    score = nearest_neighbour_score(drawn, own, pictures, chunk=chunk)
    assert score.nearest == tuple(nearest)
    assert score.right == sum(a == b for a, b in zip(own, nearest, strict=True)) >= 5


def test_distances_of_large_bright_pictures_are_exact() -> None:
    """One grey level in one of 196,608 values decides; fp32 sums could not tell."""
    pictures = np.full((2, 256, 256, 3), 255, np.uint8)
    pictures[1, 0, 0, 0] = 254
    score = nearest_neighbour_score(pictures[1:], [1], pictures)
    assert (score.right, score.nearest) == (1, (1,))
    assert nearest_neighbour_score(pictures[1:], [0], pictures).right == 0


def test_any_of_equal_pictures_counts() -> None:
    pictures = np.zeros((3, 2, 2, 3), np.uint8)
    pictures[0] = 9
    assert nearest_neighbour_score(pictures[1:2], [2], pictures).right == 1


def test_no_drawing_is_no_score() -> None:
    pictures = np.zeros((3, 2, 2, 3), np.uint8)
    assert nearest_neighbour_score(pictures[:0], [], pictures).fraction == 0.0


def test_shapes_that_do_not_fit_are_refused() -> None:
    pictures = np.zeros((3, 2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        nearest_neighbour_score(pictures, [0], pictures)
    with pytest.raises(ValueError, match="do not fit"):
        nearest_neighbour_score(pictures, [0, 1, 2], pictures[:, :1])

"""Recall: a model's knowledge of the pictures it was trained on, by nearest neighbours in pixel space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tt_cli.data.stream.subset import subset_examples
from tt_cli.draw.drawing import Drawing, DrawingModels, DrawingSettings, draw
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.task.picture_codec import decode_pictures


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
        others = pictures[start : start + chunk].reshape(-1, flat.shape[1]).astype(np.float64)
        columns.append(squares + (others * others).sum(axis=1) - 2 * (flat @ others.T))
    distances = np.concatenate(columns, axis=1)
    own_distances = distances[np.arange(len(drawn)), list(own)]
    right = int((own_distances <= distances.min(axis=1)).sum())
    return NeighbourScore(right, len(drawn), tuple(distances.argmin(axis=1).tolist()))


def recall(
    models: DrawingModels,
    *,
    captions: int = 64,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[NeighbourScore, list[Drawing]]:
    """Draw `captions` of the run's training captions, chosen by `seed`, once each.

    Every code is the likeliest one, so that the score says what the model knows and not how lucky it was.
    It counts the drawings whose nearest neighbour among all training pictures, as decoded from their
    codes, is their own.
    """
    examples = subset_examples(models.run)
    chosen = np.random.default_rng(seed).permutation(len(examples))[:captions].tolist()
    settings = DrawingSettings(samples=1, sampling=Sampling(top_k=1), seed=seed)
    drawings = draw(models, [examples[place].caption for place in chosen], settings, on_progress=on_progress)
    pictures = decode_pictures(models.vqgan, np.stack([example.codes for example in examples]).astype(np.int64))
    score = nearest_neighbour_score(np.stack([drawing.picture for drawing in drawings]), chosen, pictures)
    return score, drawings

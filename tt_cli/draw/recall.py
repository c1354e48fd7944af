"""Recall: a model's knowledge of the pictures it was trained on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tt_cli.data.stream.subset import subset_examples
from tt_cli.draw.drawing import Drawing, DrawingModels, DrawingSettings, draw
from tt_cli.draw.neighbours import NeighbourScore, nearest_neighbour_score
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.task.picture_codec import decode_pictures


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

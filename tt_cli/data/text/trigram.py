"""A trigram model of tokens: the baseline that a language model must beat.

Interpolated Kneser-Ney with one discount for each order (Chen and Goodman 1999, section 3).
"""

from __future__ import annotations

import numpy as np


def trigram_perplexity(train: np.ndarray, heldout: np.ndarray, vocabulary: int) -> float:
    """The perplexity of heldout (m,) after its first two, by the trigrams of train (n,); ids are below `vocabulary`."""
    grams, times = np.unique((train[:-2] * vocabulary + train[1:-1]) * vocabulary + train[2:], return_counts=True)
    orders = [(grams, times)]
    for order in (2, 1):  # counted is in how many contexts a gram was seen, not how often
        orders.append(np.unique(orders[-1][0] % vocabulary**order, return_counts=True))
    probability = np.full(len(heldout) - 2, 1 / vocabulary)
    for order, (grams, times) in enumerate(reversed(orders), 1):
        once, twice = (times == 1).sum(), (times == 2).sum()
        discount = once / (once + 2 * twice) if once else 0.5  # never 0: what was not seen is possible
        contexts, first, kinds = np.unique(grams // vocabulary, return_index=True, return_counts=True)
        totals = np.add.reduceat(times, first)
        wanted = sum(heldout[2 - back : len(heldout) - back] * vocabulary**back for back in range(order))
        counted, _ = _looked_up(grams, times, wanted)
        total, seen = _looked_up(contexts, totals, wanted // vocabulary)
        spread = discount * _looked_up(contexts, kinds, wanted // vocabulary)[0]
        shorter = probability
        probability = (np.maximum(counted - discount, 0) + spread * shorter) / np.maximum(total, 1)
        probability = np.where(seen, probability, shorter)
    return float(np.exp(-np.log(probability).mean()))


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value of each wanted key, 0 where it is not among the sorted keys, and whether it is."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    known = keys[places] == wanted
    return np.where(known, values[places], 0), known

"""Choosing one code from logits: filters first and temperature after, as the paper's authors sampled, or the reverse.

Chance comes in as one uniform number for each code, so a picture depends on its own numbers and not on what is drawn
beside it, and nothing waits for a GPU. The number is looked up in the cumulative probabilities in the order of the
vocabulary: rounding that differs between batch sizes moves their borders a little, it never swaps two codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tt_cli.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing a code; the defaults follow the model's probabilities.

    ``temperature_first`` divides by the temperature before the filters, as most samplers do: then ``top_p`` measures
    the probabilities that are drawn from. The authors' order (False) measures those at temperature 1. Raises
    UsageError for values that have no meaning.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    temperature_first: bool = False

    def __post_init__(self) -> None:
        if not 1e-6 < self.temperature < 1e38:  # by which float32 can be divided
            hint = "it must be above 0.000001 and below 1e38 (for the likeliest codes use top-k 1)"
            raise UsageError(f"temperature is {self.temperature}; {hint}")
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (off)")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities to draw from, for logits (b, V): (b, V) float32, 0 for codes that the filters drop."""
        logits = logits.float()
        if self.temperature_first:
            logits = logits / self.temperature
        logits = filter_top_p(filter_top_k(logits, self.top_k), self.top_p)
        if not self.temperature_first:
            logits = logits / self.temperature
        return logits.softmax(dim=-1)

    def choose(self, logits: Tensor, noise: Tensor) -> Tensor:
        """One id (b,) int64 for each row of logits (b, V), by its number in [0, 1) of noise (b,)."""
        return pick(self.probabilities(logits), noise)


def filter_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the ``top_k`` largest of each row of (b, V), the rest become -inf; 0 keeps all."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    values, indices = logits.topk(top_k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, indices, values)


def filter_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens of each row of (b, V) up to the first that lifts their sum above ``top_p``."""
    if top_p >= 1:
        return logits
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    sums = values.softmax(dim=-1).cumsum(dim=-1)
    drop = torch.zeros_like(sums, dtype=torch.bool)
    drop[..., 1:] = sums[..., :-1] > top_p
    return logits.masked_fill(drop.scatter(-1, indices, drop), -torch.inf)


def pick(probabilities: Tensor, noise: Tensor) -> Tensor:
    """The first id of each row of (b, V) whose cumulative probability exceeds noise (b,), in [0, 1): (b,) int64.

    Each id is picked with its probability, one of probability 0 never.
    """
    # float64: the sums of thousands of small numbers must not drown the smallest, and rise in any order of adding.
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    wanted = noise.to(torch.float64)[:, None] * sums[:, -1:]
    ids = torch.searchsorted(sums, wanted, right=True)[:, 0]
    # A row of NaN has no such id; the last one keeps it from reading past a table.
    return ids.clamp_max(probabilities.shape[1] - 1)

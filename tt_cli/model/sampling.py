"""Drawing one token from logits: filters first, temperature after, as the paper's authors sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from tt_cli.errors import UsageError


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise UsageError for a temperature, top-k or top-p that has no meaning."""
    if not 0 < temperature < float("inf"):
        raise UsageError(f"temperature is {temperature}; it must be above 0 (for the likeliest codes use top-k 1)")
    if top_k < 0:
        raise UsageError(f"top-k is {top_k}; it must be 0 (off) or more")
    if not 0 < top_p <= 1:
        raise UsageError(f"top-p is {top_p}; it must be above 0 and at most 1 (off)")


def filter_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the ``top_k`` largest of each row of (b, V), the rest become -inf; 0 keeps all."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    values, indices = logits.topk(top_k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, indices, values)


def filter_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens of each row of (b, V) up to the first that lifts their sum above
    ``top_p``."""
    if top_p >= 1:
        return logits
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    sums = values.softmax(dim=-1).cumsum(dim=-1)
    drop = torch.zeros_like(sums, dtype=torch.bool)
    drop[..., 1:] = sums[..., :-1] > top_p
    return logits.masked_fill(drop.scatter(-1, indices, drop), -torch.inf)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id (b,) int64 from each row of logits (b, V): top-k filter, nucleus filter, then temperature."""
    filtered = filter_top_p(filter_top_k(logits.float(), top_k), top_p)
    probabilities = (filtered / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

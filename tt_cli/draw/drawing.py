"""Prompts to codes to pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from tt_cli.data import decode_pictures
from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from tt_cli.data import Tokenizer
    from tt_cli.model import Dalle, Vqgan
    from tt_cli.run import RunConfig

# Rows drawn side by side unless the caller says otherwise: the cache takes memory for each code of each row.
CODES_AT_ONCE = 8192


@dataclass(frozen=True)
class Drawing:
    """One candidate for one prompt."""

    prompt: str
    index: int  # 0, 1, … among the samples of its prompt
    codes: np.ndarray  # (n,) int64, raster order
    picture: np.ndarray  # (H, W, 3) uint8


def draw(
    run: RunConfig,
    model: Dalle,
    vqgan: Vqgan,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    samples: int = 4,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int | None = None,
    mix_prompts: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Drawing]:
    """Draw `samples` candidates for each prompt, in the order of the prompts.

    The same arguments give the same pictures on the same machine. A prompt's pictures do not depend on the
    other prompts, unless `mix_prompts` lets prompts share a batch, which is much faster for many prompts of
    few samples. `batch` is the most pictures drawn side by side. `top_k` = 0 and `top_p` = 1 switch these
    filters off. `on_progress` gets the numbers of codes drawn and to draw. Raises UsageError for an empty
    prompt or sampling settings out of range.
    """
    if samples < 1:
        raise UsageError(f"samples is {samples}; it must be 1 or more")
    if any(not prompt.strip() for prompt in prompts):
        raise UsageError("a prompt is empty; say what to draw")
    length = run.vqgan.grid**2
    size = batch or max(1, CODES_AT_ONCE // length)
    total = len(prompts) * samples * length
    device = next(model.parameters()).device
    drawings: list[Drawing] = []
    model.eval()
    for rows in _batches(prompts, samples, size, mix_prompts):
        before = len(drawings) * length

        def on_token(known: int, rows: int = len(rows), before: int = before) -> None:
            on_progress(before + known * rows, total)

        codes = model.generate(
            tokenizer.encode([prompt for prompt, _ in rows]).to(device),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=torch.Generator(device).manual_seed(_seed(seed, rows)),
            on_token=on_token,
        )
        arrays = codes.cpu().numpy()
        for (prompt, index), row, picture in zip(rows, arrays, decode_pictures(vqgan, arrays), strict=True):
            drawings.append(Drawing(prompt, index, row, picture))
    return drawings


def cut_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, str]:
    """The prompts that have more tokens than the model reads, with the part that it reads."""
    ids = tokenizer.encode(prompts)
    full = (ids != tokenizer.pad_id).all(dim=1).tolist()
    kept = zip(prompts, full, tokenizer.decode(ids), strict=True)
    return {prompt: read for prompt, filled, read in kept if filled and len(read) < len(prompt.strip())}


def _batches(prompts: Sequence[str], samples: int, size: int, mix_prompts: bool) -> Iterator[list[tuple[str, int]]]:
    """Rows (prompt, index) of each batch of at most `size`."""
    rows = [(place, prompt, index) for place, prompt in enumerate(prompts) for index in range(samples)]
    for _, group in groupby(rows, key=lambda row: None if mix_prompts else row[0]):
        together = [(prompt, index) for _, prompt, index in group]
        for start in range(0, len(together), size):
            yield together[start : start + size]


def _seed(seed: int, rows: list[tuple[str, int]]) -> int:
    """63 bits from the seed and what is drawn with it."""
    return int.from_bytes(hashlib.sha256(repr((seed, rows)).encode()).digest()[:8], "big") >> 1

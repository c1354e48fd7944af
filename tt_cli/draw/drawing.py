"""Prompts to codes to pictures."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch

from tt_cli.data.tokenizer import Tokenizer
from tt_cli.draw.draw_batches import MOST_ROWS, BatchLimit, PromptSlice, memory_limit, next_batch
from tt_cli.errors import TTError, UsageError
from tt_cli.memory import shown
from tt_cli.model.allocator import attempt
from tt_cli.model.dalle import Dalle
from tt_cli.model.layers.projection import drawing_dtype
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.drawing_memory import drawing_bytes
from tt_cli.model.sampling.generation import StepDecoder, draw_codes
from tt_cli.model.vqgan import Vqgan
from tt_cli.run import RunConfig
from tt_cli.task.picture_codec import decode_pictures

# Values of float32 that decoding one picture holds at once, for each of its pixels and of the VQGAN's base channels.
_DECODING_VALUES = 5
_DECODED_AT_ONCE = 64


@dataclass(frozen=True)
class Drawing:
    """One candidate for one prompt."""

    prompt: str
    index: int  # 0, 1, … among the samples of its prompt
    codes: np.ndarray  # (n,) int64, raster order
    picture: np.ndarray  # (H, W, 3) uint8
    similarity: float | None = None  # cosine, -1 to 1, of picture and prompt, as CLIP sees it; None: not ranked


@dataclass(frozen=True)
class DrawingModels:
    """All that draws for a run: its decoder, its VQGAN and its tokenizer."""

    run: RunConfig
    decoder: Dalle
    vqgan: Vqgan
    tokenizer: Tokenizer


@dataclass(frozen=True)
class DrawingSettings:
    """The candidates of each prompt, and the means to draw them."""

    samples: int = 4  # candidates for each prompt
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    batch: int | None = None  # pictures side by side at most
    memory: int | None = None  # bytes to draw in; None: a share of what is free

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; it must be 1 or more")


def draw(
    models: DrawingModels, prompts: Sequence[str], settings: DrawingSettings, **hears: Callable[..., None]
) -> list[Drawing]:
    """All that `draw_in_turn` yields. hears: its on_progress and on_message."""
    return [drawing for block in draw_in_turn(models, prompts, settings, **hears) for drawing in block]


def draw_in_turn(
    models: DrawingModels,
    prompts: Sequence[str],
    settings: DrawingSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_message: Callable[[str], None] = lambda line: None,
) -> Iterator[list[Drawing]]:
    """Draw the candidates for each prompt, in the order of the prompts: yield all of some prompts when they are done.

    As many are drawn side by side as fit into the memory. Where it runs out all the same, the batch is halved and what
    was drawn is kept. On GPUs that can, matrix products run in bfloat16. `on_message` is told what was chosen and why,
    `on_progress` gets the numbers of codes drawn and to draw; the first falls back when a batch is begun again.

    A picture depends on seed, prompt, index and sampling alone, not on what is drawn beside it; rounding can make a
    rare exception when the batch changes, see draw_codes. Raises UsageError for an empty prompt or for memory that not
    one picture fits into, TTError where memory runs out with a single picture.
    """
    if any(not prompt.strip() for prompt in prompts):
        raise UsageError("a prompt is empty; say what to draw")
    if not prompts:
        return
    model = models.decoder.eval()
    device = next(model.parameters()).device
    limit = memory_limit(device, settings.memory)
    text = models.tokenizer.encode(prompts).to(device)
    drawer = _Drawer(model, text, limit, on_progress, on_message)
    for first, codes in drawer.draw(prompts, settings):
        candidates = [(prompt, i) for prompt in prompts[first : first + len(codes)] for i in range(settings.samples)]
        rows = codes.reshape(len(candidates), -1)
        pictures = _decode(models.vqgan, rows, limit)
        yield [Drawing(*which, row, picture) for which, row, picture in zip(candidates, rows, pictures, strict=True)]


def cut_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, str]:
    """The prompts that have more tokens than the model reads, with the part that it reads."""
    ids = tokenizer.encode(prompts)
    full = (ids != tokenizer.pad_id).all(dim=1).tolist()
    kept = zip(prompts, full, tokenizer.decode(ids), strict=True)
    return {prompt: read for prompt, filled, read in kept if filled and len(read) < len(prompt.strip())}


def candidate_noise(seed: int, prompt: str, index: int, codes: int) -> np.ndarray:
    """The chance in one candidate: a float64 number in [0, 1) for each of its codes, the same on every machine."""
    key = hashlib.sha256(ascii((seed, prompt, index)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "big"))).random(codes)


class _Drawer:
    """Draws the codes of all candidates, batch after batch. text (prompts, length): the prompts' tokens."""

    def __init__(
        self,
        model: Dalle,
        text: torch.Tensor,
        limit: BatchLimit,
        on_progress: Callable[[int, int], None],
        on_message: Callable[[str], None],
    ) -> None:
        self.model, self.text, self.limit = model, text, limit
        self.on_progress, self.on_message = on_progress, cache(on_message)  # which hears no line twice
        self.dtype, self.dtype_reason = drawing_dtype(text.device)
        self.needed = cache(lambda prompts, samples: drawing_bytes(model, prompts, samples, self.dtype))
        self.decoder: StepDecoder | None = None

    def draw(self, prompts: Sequence[str], settings: DrawingSettings) -> Iterator[tuple[int, np.ndarray]]:
        """Of some prompts after the others, as they are done: the place of the first, and codes (k, samples, n) int64.

        What a batch takes is free meanwhile.
        """
        if self.limit.asked and self.needed(1, 1) > self.limit.nbytes:
            raise UsageError(
                f"drawing one picture takes {shown(self.needed(1, 1))}, more than the "
                f"{shown(self.limit.nbytes)} it may take; allow more memory"
            )
        codes = np.empty((len(prompts), settings.samples, self.model.config.image_positions), dtype=np.int64)
        waiting = deque(PromptSlice(place, 0, settings.samples) for place in range(len(prompts)))
        most, done, given = min(settings.batch or MOST_ROWS, MOST_ROWS), 0, 0
        while waiting:
            parts = next_batch(waiting, partial(self._fits, most))
            rows = len(parts) * parts[0].count
            noise = [
                candidate_noise(settings.seed, prompts[part.place], index, codes.shape[2])
                for part in parts
                for index in range(part.first, part.first + part.count)
            ]

            def on_token(known: int, rows: int = rows, done: int = done) -> None:
                self.on_progress(done + known * rows, codes.size)

            batch = partial(self._draw_batch, parts, np.stack(noise), settings.sampling, on_token)
            drawn, refusal = attempt(batch)
            if drawn is None:
                self.decoder = None
                torch.cuda.empty_cache()  # nothing where CUDA is not used
                if rows == 1:
                    where = "memory" if self.text.device.type == "cpu" else f"memory on {self.text.device}"
                    raise TTError(f"there is not enough {where} to draw even one picture at a time: {refusal}")
                waiting.extendleft(reversed(parts))
                most = rows // 2
                self.on_message(f"out of memory with {rows} pictures side by side; going on with {most}")
                continue
            for part, its in zip(parts, drawn.reshape(len(parts), -1, codes.shape[2]), strict=True):
                codes[part.place, part.first : part.first + part.count] = its
            done += drawn.size
            if (ready := waiting[0].place if waiting else len(prompts)) > given:
                self.decoder = None
                yield given, codes[given:ready]
                given = ready

    def _fits(self, most: int, prompts: int, samples: int) -> bool:
        return prompts * samples <= most and self.needed(prompts, samples) <= self.limit.nbytes

    def _draw_batch(
        self, parts: list[PromptSlice], noise: np.ndarray, sampling: Sampling, on_token: Callable[[int], None]
    ) -> np.ndarray:
        """Codes (rows, n) of these parts."""
        decoder = self._decoder(len(parts), parts[0].count)
        text = self.text[[part.place for part in parts]]
        chance = torch.from_numpy(noise).to(text.device)
        return draw_codes(decoder, text, chance, sampling, on_token=on_token).cpu().numpy()

    def _decoder(self, prompts: int, samples: int) -> StepDecoder:
        """The last batch's decoder if it has this size, else a new one; the old one's memory is free by then."""
        if self.decoder is None or (self.decoder.prompts, self.decoder.samples) != (prompts, samples):
            self.decoder = None
            self.decoder = StepDecoder(self.model, prompts, samples, self.dtype)
            rows, needed = prompts * samples, self.needed(prompts, samples)
            self.on_message(
                f"batch {rows}: {shown(needed)} of {shown(self.limit.nbytes)} ({self.limit.reason}); "
                f"{str(self.dtype).removeprefix('torch.')}: {self.dtype_reason}; {self.decoder.mode}"
            )
        return self.decoder


def _decode(vqgan: Vqgan, codes: np.ndarray, limit: BatchLimit) -> list[np.ndarray]:
    """Pictures (H, W, 3) uint8, each in memory of its own, of codes (b, n); as many at a time as fit."""
    config = vqgan.config
    picture_bytes = 4 * _DECODING_VALUES * config.channels * config.resolution**2
    size = max(1, min(_DECODED_AT_ONCE, limit.nbytes // picture_bytes))
    pictures: list[np.ndarray] = []
    start = 0
    while start < len(codes):
        decoded, refusal = attempt(partial(decode_pictures, vqgan, codes[start : start + size], batch=size))
        if decoded is not None:
            pictures += map(np.copy, decoded)
            start += size
            continue
        torch.cuda.empty_cache()
        if size == 1:
            raise TTError(f"there is not enough memory to decode even one picture at a time: {refusal}")
        size //= 2
    return pictures

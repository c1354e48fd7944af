"""All logits at once, drawing without a cache, which tests compare with, and codes drawn from a generator's numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tt_cli.model.dalle import Dalle
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.generation import StepDecoder, draw_codes, image_logits


def whole_logits(dalle: Dalle, text: Tensor, image: Tensor) -> Tensor:
    """Logits (b, n, vocab) of text (b, text_length) int64 and image codes (b, m) int64.

    n is text_length + 1 + m, but at most text_length + image_size**2. Row i predicts position i + 1; ids
    that cannot stand there have the lowest finite value of the dtype.
    """
    config = dalle.config
    z = dalle.final_norm(dalle.trunk(dalle.embed(dalle.ids(text, image))))
    weight, bias = dalle.logits.weight, dalle.logits.bias
    rows, split = config.text_length, config.text_ids
    text_logits = F.linear(z[:, :rows], weight[:split], bias[:split])
    image_logits = F.linear(z[:, rows:], weight[split:], bias[split:])
    lowest = torch.finfo(text_logits.dtype).min
    text_logits = F.pad(text_logits, (0, config.image_vocab), value=lowest)
    return torch.cat([text_logits, F.pad(image_logits, (split, 0), value=lowest)], dim=1)


class WholeDecoder:
    """The slow way: everything runs through the trunk again for each code."""

    def __init__(self, dalle: Dalle, samples: int = 1) -> None:
        self.dalle, self.samples = dalle, samples

    def prefill(self, text: Tensor) -> Tensor:
        """As StepDecoder's."""
        self.text = text.repeat_interleave(self.samples, dim=0)
        self.codes = self.text.new_empty(len(self.text), 0)
        return self._logits()

    def step(self, code: Tensor, position: int) -> Tensor:
        """As StepDecoder's."""
        self.codes = torch.cat([self.codes[:, :position], code[:, None]], dim=1)
        return self._logits()

    def _logits(self) -> Tensor:
        dalle = self.dalle
        return image_logits(dalle, dalle.trunk(dalle.embed(dalle.ids(self.text, self.codes)))[:, -1])


def generate(
    dalle: Dalle,
    text: Tensor,
    sampling: Sampling | None = None,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    cache: bool = True,
    **options: Any,
) -> Tensor:
    """Codes (p * samples, n) for text (p, text_length), with or without a cache; options: draw_codes'."""
    shape = (len(text) * samples, dalle.config.image_positions)
    noise = torch.rand(shape, generator=generator, device=text.device, dtype=torch.float64)
    decoder = StepDecoder(dalle, len(text), samples) if cache else WholeDecoder(dalle, samples)
    return draw_codes(decoder, text, noise, sampling or Sampling(), **options)

"""Drawing codes one by one, many pictures side by side, with caches that follow each layer's attention type.

The text runs through the trunk once for each prompt. After that a step feeds one code of
every picture: its keys and values join the caches, and the query sees the text region plus its own row, column or
window (see cache). The codes are those that the whole trunk, run anew for each of them, would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tt_cli.model.dalle import Dalle
from tt_cli.model.layers.blocks import layer_norm
from tt_cli.model.layers.projection import Projection
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.cuda_graph import captured
from tt_cli.model.sampling.kv_cache import Caches, KeyValueCache, StepTables, step_shifted

# Prompts whose text runs through the trunk together: enough rows for any device, and a bound on its memory.
PROMPTS_AT_ONCE = 4


@torch.no_grad()
def draw_codes(
    decoder: StepDecoder,
    text: Tensor,
    noise: Tensor,
    sampling: Sampling,
    *,
    on_token: Callable[[int], None] = lambda known: None,
) -> Tensor:
    """Draw codes (b, N) int64 for captions text (p, text_length) int64, b a multiple of p, in raster order.

    Each code is chosen by its number in [0, 1) of noise (b, N), see Sampling. ``on_token`` is called with the number of
    codes known so far after each new one, on a GPU after each row.

    A picture depends on its caption and its noise alone, but for rounding: matrix products of another number of rows
    add in another order, and where a number falls between a code's two borders the other code is chosen, and every
    later one may differ too. In float32 at the paper's size, batch 1 and 16 of an untrained model would differ in one
    of 140 pictures with top-k 256, in one of six without filters.
    """
    codes = torch.empty(noise.shape, dtype=torch.int64, device=text.device)
    positions = codes.shape[1]
    side = round(positions**0.5)
    logits = decoder.prefill(text)
    for position in range(positions):
        if position:
            logits = decoder.step(codes[:, position - 1], position - 1)
        codes[:, position] = sampling.choose(logits, noise[:, position])
        if codes.is_cuda:  # the host runs ahead of a GPU by a row at most, so that progress is what was done
            if (position + 1) % side:
                continue
            torch.cuda.synchronize(codes.device)
        on_token(position + 1)
    return codes


class _Branch(NamedTuple):
    """One branch of one layer, ready to step."""

    norm: Sequence[Tensor]  # weight, bias
    scale: Tensor
    first: Projection
    second: Projection
    shift: Tensor | None
    cache: KeyValueCache | None = None


class StepDecoder:
    """``samples`` pictures of each of ``prompts`` prompts, drawn side by side; can be used again and again.

    ``dtype`` is that of matrix products and caches (default: Dalle.compute_dtype()); the residual stream and norms
    keep the weights' dtype. ``mode`` says how a step runs. Later changes of the model's weights are not seen.
    """

    @torch.no_grad()
    def __init__(self, dalle: Dalle, prompts: int, samples: int = 1, dtype: torch.dtype | None = None) -> None:
        self.dalle, self.prompts, self.samples = dalle, prompts, samples
        self.dtype = dtype or dalle.compute_dtype()
        config, device = dalle.config, dalle.logits.weight.device
        self.tables = StepTables.of(config, device, self.dtype)
        self.caches = Caches(config, prompts, samples, device, self.dtype)
        self._projections: dict[Tensor, Projection] = {}
        self._layers = [self._layer(layer) for layer in range(config.depth)]
        weight, bias = dalle.logits.weight[config.text_ids :], dalle.logits.bias[config.text_ids :]
        self._logits = Projection(weight, bias, self.dtype, prompts * samples)
        self._code = torch.zeros(prompts * samples, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph, self.mode = captured(self._step, device)

    @torch.no_grad()
    def prefill(self, text: Tensor) -> Tensor:
        """Take text (p, text_length); logits (b, image_vocab) of the first code. Forgets the pictures drawn before."""
        if len(text) != self.prompts:
            raise ValueError(f"text has {len(text)} rows, this decoder draws for {self.prompts} prompts")
        self.caches.forget()
        outputs = []
        for start in range(0, self.prompts, PROMPTS_AT_ONCE):
            prompts = slice(start, min(start + PROMPTS_AT_ONCE, self.prompts))

            def record(layer: int, k: Tensor, v: Tensor, prompts: slice = prompts) -> None:
                self.caches.attention[layer].text[:, prompts] = torch.stack([k, v])

            x = self.dalle.embed(self.dalle.ids(text[prompts], None))
            outputs.append(image_logits(self.dalle, self.dalle.trunk(x, self.dtype, record)[:, -1], self.dtype))
        return torch.cat(outputs).repeat_interleave(self.samples, dim=0)

    @torch.no_grad()
    def step(self, code: Tensor, position: int) -> Tensor:
        """Take the code (b,) at raster position ``position``; logits of the next, valid until the next call."""
        self._code.copy_(code)
        self._position.fill_(position)
        return self._step() if self._graph is None else self._graph()

    def _layer(self, layer: int) -> tuple[_Branch, _Branch]:
        """Layer ``layer``'s weights and caches; the layers of a set share its projections."""
        attention, feed_forward = self.dalle.layer_weights(layer)
        *norm, scale, qkv, out, out_bias = attention
        *own_norm, own_scale, expand, expand_bias, contract, contract_bias = feed_forward
        shifts = self.caches.attention_shifts, self.caches.feed_forward_shifts
        shift, own_shift = (states[layer] if states else None for states in shifts)
        first, second = self._projection(qkv, None), self._projection(out, out_bias)
        up, down = self._projection(expand, expand_bias), self._projection(contract, contract_bias)
        attending = _Branch(norm, scale, first, second, shift, self.caches.attention[layer])
        return attending, _Branch(own_norm, own_scale, up, down, own_shift)

    def _projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight not in self._projections:
            self._projections[weight] = Projection(weight, bias, self.dtype, self.prompts * self.samples)
        return self._projections[weight]

    def _step(self) -> Tensor:
        """Logits after the codes self._code at self._position; nothing here depends on their values' being known."""
        dalle, config = self.dalle, self.dalle.config
        place = self.tables.at(self._position)
        with _no_autocast(self._code.device):
            x1 = x2 = dalle.embed(self._code + config.text_ids)
            for attention, feed_forward in self._layers:
                x1 = self._attend(attention, x1, x2 if config.reversible else x1, place)
                if config.reversible:
                    x2 = self._feed(feed_forward, x2, x1, place)
                else:
                    x1 = self._feed(feed_forward, x1, x1, place)
            x = (x1 + x2) / 2 if config.reversible else x1
            return self._logits(dalle.final_norm(x).to(self.dtype))

    def _attend(self, branch: _Branch, total: Tensor, x: Tensor, place: StepTables) -> Tensor:
        """total + Attention(x), both (b, dim)."""
        config = self.dalle.config
        assert branch.cache is not None
        projected = branch.first(self._normed(branch, x, place))
        pairs = projected.unflatten(1, (3, config.heads, -1, 2)).unflatten(0, (self.prompts, self.samples))
        if self.dtype.itemsize < 4:  # the products are computed in float32
            pairs = pairs.float()
        turned = torch.view_as_complex(pairs).permute(2, 0, 3, 1, 4)
        factors = torch.view_as_complex(place.rotation)[:, None, None, None]
        rotated = torch.view_as_real((turned * factors).contiguous()).flatten(-2).to(self.dtype)
        attended = branch.cache.attend(rotated, place)
        attended = attended.transpose(1, 2).reshape(len(x), config.inner_dim)
        return torch.addcmul(total, branch.second(attended), branch.scale)

    def _feed(self, branch: _Branch, total: Tensor, x: Tensor, place: StepTables) -> Tensor:
        """total + FeedForward(x), both (b, dim)."""
        value, gate = branch.first(self._normed(branch, x, place)).chunk(2, dim=1)
        return torch.addcmul(total, branch.second(F.gelu(gate).mul_(value)), branch.scale)

    def _normed(self, branch: _Branch, x: Tensor, place: StepTables) -> Tensor:
        h = layer_norm(x, *branch.norm).to(self.dtype)
        return h if branch.shift is None else step_shifted(branch.shift, h, place)


def image_logits(dalle: Dalle, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Logits (b, image_vocab) after the trunk's output x (b, dim)."""
    first, dtype = dalle.config.text_ids, dtype or dalle.compute_dtype()
    z = dalle.final_norm(x).to(dtype)
    return F.linear(z, dalle.logits.weight[first:].to(dtype), dalle.logits.bias[first:].to(dtype))


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The decoder casts by itself."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()

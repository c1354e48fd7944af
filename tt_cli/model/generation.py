"""Drawing codes one by one, with a cache that follows each layer's attention type.

The text (and a given image prefix) runs through the trunk once. After that a step feeds one code: its keys
and values join the cache, and the query sees the text region plus its own row, column or window. The token
shift needs the normed input of the last ``image_size`` positions of every branch. The tokens are those of the
slow way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tt_cli.model.blocks import feed_forward, layer_norm
from tt_cli.model.rotary import split_heads
from tt_cli.model.sampling import check_sampling, sample

if TYPE_CHECKING:
    from tt_cli.model.attention import AttentionPattern
    from tt_cli.model.config import DalleConfig
    from tt_cli.model.dalle import Dalle

# What one step adds to the residual stream: (layer, x, weights) -> (b, dim) or (b, n, dim).
BranchStep = Callable[[int, Tensor, list[Tensor]], Tensor]


@torch.no_grad()
def generate(
    dalle: Dalle,
    text: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    cache: bool = True,
    prime: Tensor | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Tensor:
    """Draw codes (b, image_size**2) int64 for captions text (b, text_length) int64, one picture per row.

    ``prime`` (b, m) int64 fixes the first m codes. ``on_token`` is called with the number of codes known so
    far after each new one. The same arguments and generator state give the same codes on the same machine.
    Raises UsageError for a temperature, top_k or top_p out of range.
    """
    check_sampling(temperature, top_k, top_p)
    config = dalle.config
    codes = text.new_empty(text.shape[0], config.image_positions)
    known = 0
    if prime is not None:
        known = prime.shape[1]
        if len(prime) != len(text) or known > config.image_positions:
            expected = f"({len(text)}, 0..{config.image_positions})"
            raise ValueError(f"prime has shape {tuple(prime.shape)}, expected {expected}")
        codes[:, :known] = prime
    decoder = Decoder(dalle, text.shape[0]) if cache else None
    for position in range(known, config.image_positions):
        if decoder is None:
            x = dalle.trunk(dalle.embed(dalle.ids(text, codes[:, :position])))[:, -1]
        elif position == known:
            x = decoder.prefill(dalle.ids(text, codes[:, :position]))
        else:
            x = decoder.step(codes[:, position - 1], position - 1)
        z = dalle.final_norm(x)
        weight, bias = dalle.logits.weight[config.text_ids :], dalle.logits.bias[config.text_ids :]
        logits = F.linear(z, weight, bias)
        codes[:, position] = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if on_token is not None:
            on_token(position + 1)
    return codes


class Decoder:
    """The state of drawing b pictures at once."""

    def __init__(self, dalle: Dalle, b: int) -> None:
        config = dalle.config
        self.dalle = dalle
        self.dtype = dalle.compute_dtype()
        self.attention_caches: list[KeyValueCache] = []
        self.attention_shifts: list[ShiftState] = []
        self.feed_forward_shifts: list[ShiftState] = []
        like = dalle.logits.weight
        for layer in range(config.depth):
            pattern = dalle.attention_branches[config.attention_kind(layer)].pattern
            self.attention_caches.append(KeyValueCache(config, pattern, b, like.device, self.dtype))
            self.attention_shifts.append(ShiftState(config, b, like))
            self.feed_forward_shifts.append(ShiftState(config, b, like))
        self.weights = [dalle.layer_weights(layer) for layer in range(config.depth)]

    def prefill(self, ids: Tensor) -> Tensor:
        """Feed ids (b, n): the whole text region and any known codes; returns the last position, (b, dim)."""

        def attention(layer: int, x: Tensor, weights: list[Tensor]) -> Tensor:
            branch = self.dalle.attention_branches[self.dalle.config.attention_kind(layer)]
            recorder = _Recorder(x.shape[1], self.attention_shifts[layer], self.attention_caches[layer])
            return branch(x, weights, self.dtype, recorder)

        def feed(layer: int, x: Tensor, weights: list[Tensor]) -> Tensor:
            recorder = _Recorder(x.shape[1], self.feed_forward_shifts[layer])
            return self.dalle.feed_forward_branch(x, weights, self.dtype, recorder)

        return self._run(self.dalle.embed(ids), attention, feed)[:, -1]

    def step(self, code: Tensor, position: int) -> Tensor:
        """Feed the code (b,) at raster position ``position``; returns its output (b, dim)."""
        config, dtype = self.dalle.config, self.dtype
        table = None
        if config.rotary:
            at = config.text_positions + position
            table = self.dalle.rotary.to(code.device, dtype)[at : at + 1]

        def attention(layer: int, x: Tensor, weights: list[Tensor]) -> Tensor:
            norm_weight, norm_bias, scale, qkv, out_weight, out_bias = weights
            h = self.attention_shifts[layer].step(layer_norm(x, norm_weight, norm_bias), position)
            projected = F.linear(h.to(dtype), qkv.to(dtype))[:, None]
            q, k, v = split_heads(projected, table, config.heads, 1).unbind()
            keys, values = self.attention_caches[layer].step(k, v, position)
            attended = F.scaled_dot_product_attention(q, keys, values).flatten(1)
            return F.linear(attended, out_weight.to(dtype), out_bias.to(dtype)) * scale

        def feed(layer: int, x: Tensor, weights: list[Tensor]) -> Tensor:
            norm_weight, norm_bias, scale, *matrices = weights
            h = self.feed_forward_shifts[layer].step(layer_norm(x, norm_weight, norm_bias), position)
            return feed_forward(h, matrices, dtype) * scale

        return self._run(self.dalle.embed(code + config.text_ids), attention, feed)

    def _run(self, x: Tensor, attention: BranchStep, feed: BranchStep) -> Tensor:
        reversible = self.dalle.config.reversible
        x1 = x2 = x
        with torch.autocast(x.device.type, enabled=False):
            for layer, (attention_weights, feed_weights) in enumerate(self.weights):
                if reversible:
                    x1 = x1 + attention(layer, x2, attention_weights)
                    x2 = x2 + feed(layer, x1, feed_weights)
                else:
                    x1 = x1 + attention(layer, x1, attention_weights)
                    x1 = x1 + feed(layer, x1, feed_weights)
        return (x1 + x2) / 2 if reversible else x1


class ShiftState:
    """Normed inputs that later positions of one branch take over (see token_shift)."""

    def __init__(self, config: DalleConfig, b: int, like: Tensor) -> None:
        self.config = config
        self.quarter = config.dim // 4
        # By image column: what the newest position of that column gives to the one below it.
        self.above = like.new_zeros(config.image_size, b, self.quarter)
        self.left = like.new_zeros(b, self.quarter)

    def fill(self, h: Tensor) -> None:
        """Remember h (b, n, dim) of the text region and n - text_positions codes."""
        text = self.config.text_positions
        for position in range(max(0, h.shape[1] - text - self.config.image_size), h.shape[1] - text):
            self._put(h[:, text + position], position)

    def step(self, h: Tensor, position: int) -> Tensor:
        """Shift h (b, dim) of the code at raster position ``position`` and remember it."""
        if not self.config.shift_tokens:
            return h
        column = position % self.config.image_size
        left = self.left if column else torch.zeros_like(self.left)
        shifted = torch.cat([self.above[column], left, h[:, 2 * self.quarter :]], dim=1)
        self._put(h, position)
        return shifted

    def _put(self, h: Tensor, position: int) -> None:
        self.above[position % self.config.image_size] = h[:, : self.quarter]
        self.left = h[:, self.quarter : 2 * self.quarter]


class KeyValueCache:
    """Rotated keys and values that later positions of one layer can still attend to.

    ``seen`` (2, b, heads, text_positions + slots, dim_head) holds the text region and then the image
    positions of the query at hand. ``kept`` (2, b, heads, rows, image_size, dim_head) holds what comes back
    later: every row for axial_col, the window's rows in turn for conv_like; axial_row needs none.
    """

    def __init__(
        self, config: DalleConfig, pattern: AttentionPattern, b: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.text, self.side = config.text_positions, config.image_size
        self.kind, self.reach = pattern.kind, pattern.reach
        slots, rows = self.side, self.side
        if self.kind == "axial_row":
            rows = 0
        elif self.kind == "conv_like":
            rows = self.reach + 1
            slots = rows * (2 * self.reach + 1)
        self.rows = rows
        shape = (2, b, config.heads)
        self.seen = torch.empty(*shape, self.text + slots, config.dim_head, device=device, dtype=dtype)
        self.kept = torch.empty(*shape, rows, self.side, config.dim_head, device=device, dtype=dtype)

    def fill(self, k: Tensor, v: Tensor, n: int) -> None:
        """Remember k, v (b, heads, n or more, dim_head) of the text region and n - text_positions codes."""
        both = torch.stack([k, v])
        self.seen[:, :, :, : self.text] = both[:, :, :, : self.text]
        for position in range(n - self.text):
            self._put(both[:, :, :, self.text + position], position)

    def step(self, k: Tensor, v: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Add k, v (b, heads, 1, dim_head) at ``position``; returns all keys and values that it sees."""
        self._put(torch.stack([k, v])[:, :, :, 0], position)
        row, column = divmod(position, self.side)
        end = self.text + column + 1
        if self.kind == "axial_col":
            end = self.text + row + 1
            self.seen[:, :, :, self.text : end] = self.kept[:, :, :, : row + 1, column]
        elif self.kind == "conv_like":
            end = self.text
            first = max(0, column - self.reach)
            for near in range(max(0, row - self.reach), row + 1):
                last = column if near == row else min(self.side - 1, column + self.reach)
                start, end = end, end + last - first + 1
                self.seen[:, :, :, start:end] = self.kept[:, :, :, near % self.rows, first : last + 1]
        return self.seen[0, :, :, :end], self.seen[1, :, :, :end]

    def _put(self, both: Tensor, position: int) -> None:
        row, column = divmod(position, self.side)
        if self.kind == "axial_row":
            self.seen[:, :, :, self.text + column] = both
        else:
            self.kept[:, :, :, row % self.rows, column] = both


class _Recorder:
    """Fills the caches of one branch while its input runs through in one piece."""

    def __init__(self, n: int, shift: ShiftState, cache: KeyValueCache | None = None) -> None:
        self.n, self.shift, self.cache = n, shift, cache

    def normed(self, h: Tensor) -> None:
        """See blocks.Recorder."""
        self.shift.fill(h)

    def keys_values(self, k: Tensor, v: Tensor) -> None:
        """See blocks.Recorder."""
        if self.cache is not None:
            self.cache.fill(k, v, self.n)

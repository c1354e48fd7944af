"""Caches of drawing code by code: keys and values by attention type, and the token shift's neighbours.

Notable:
- every tensor has its whole size from the start and every place in it is an index tensor taken from a table by the
  position at hand, so one CUDA graph of a step serves all positions and the CPU runs the same code;
- keys and values of the text exist once per prompt; the pictures drawn for it attend to them together;
- beyond the text a row layer holds one row, a conv_like layer its window's rows, a column layer the picture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.rotary import rotary_table


class StepTables(NamedTuple):
    """What a step needs of each raster position of a picture of N = image_size**2 codes, for all layers; or of one."""

    column: Tensor
    # Which slot of the layer's cache takes the new key, (N,), and what is added to the scores of the text and of
    # the slots that the layer reads: 0 or -inf, (N, text_positions + slots read).
    slot: dict[str, Tensor]
    bias: dict[str, Tensor]
    rotation: Tensor  # cos and sin for q, k and v, (N, 3, dim_head // 2, 2); q's carry the scale of the scores
    shift_from: Tensor  # slot pairs of `step_shifted`, (N, 2)
    shift_to: Tensor

    @classmethod
    def of(cls, config: DalleConfig, device: torch.device, dtype: torch.dtype) -> StepTables:
        side, text = config.image_size, config.text_positions
        cpu = torch.device("cpu")
        position = torch.arange(side * side, device=cpu)
        row, column = position.div(side, rounding_mode="floor"), position % side
        slots, biases = {}, {}
        for kind in {*config.attention_types, config.last_attention}:
            slot, seen = _slots(config, kind, row, column)
            hidden = torch.zeros(len(position), text + seen.shape[1], dtype=dtype, device=cpu)
            hidden[:, text:].masked_fill_(~seen, -torch.inf)
            slots[kind], biases[kind] = slot.to(device), hidden.to(device)
        table = rotary_table(config, cpu, dtype)[text : text + side * side]
        factor = torch.tensor([config.dim_head**-0.5, 1, 1], dtype=torch.float64, device=cpu)[:, None]
        rotation = torch.view_as_real(table[:, None] * factor.to(table.dtype))
        shift_from = torch.stack([2 * column, 2 * column + 1], dim=1)
        shift_to = torch.stack([2 * column, 2 * column + 3], dim=1)
        return cls(column.to(device), slots, biases, *(x.to(device) for x in (rotation, shift_from, shift_to)))

    def at(self, position: Tensor) -> StepTables:
        """The rows of ``position`` (1,) int64."""
        column, slot, bias, *rows = self
        return StepTables(
            column.index_select(0, position),
            {kind: rows_of.index_select(0, position) for kind, rows_of in slot.items()},
            {kind: rows_of.index_select(0, position) for kind, rows_of in bias.items()},
            *(table.index_select(0, position)[0] for table in rows),
        )


def step_shifted(kept: Tensor, h: Tensor, place: StepTables) -> Tensor:
    """h (b, dim) at the position, with its neighbours' channels (see token_shift); remembers h's own.

    ``kept`` (b, 2 * (image_size + 1), dim // 4): for each column what comes from above (even) and from the left (odd).
    A position writes under its own column and to the left of the next one; what the last column writes there is never
    read, and what comes from the left of the first column stays zero.
    """
    half = h.shape[1] // 2
    taken = kept.index_select(1, place.shift_from).flatten(1)
    shifted = torch.cat([taken, h[:, half:]], dim=1)
    kept.index_copy_(1, place.shift_to, h[:, :half].unflatten(1, (2, -1)))
    return shifted


class KeyValueCache:
    """Rotated keys and values of one layer, of p prompts with s pictures each.

    ``text`` (2, p, heads, text_positions, dim_head); ``image`` (2, p, heads, s, slots, dim_head), where axial_col
    keeps column after column.
    """

    def __init__(self, config: DalleConfig, kind: str, text: Tensor, samples: int) -> None:
        self.kind, self.side = kind, config.image_size
        self.text = text
        slots = slot_count(config, kind)
        self.image = text.new_zeros(*text.shape[:3], samples, slots, config.dim_head)

    def attend(self, rotated: Tensor, place: StepTables) -> Tensor:
        """Remember k, v and attend with q of one position, (3, p, heads, s, dim_head), q scaled: the same for one."""
        q = rotated[0]
        p, heads, s, dim_head = q.shape
        groups, rows = p * heads, p * heads * s
        self.image.index_copy_(4, place.slot[self.kind], rotated[1:].unsqueeze(4))
        seen = self.image
        if self.kind == "axial_col":
            seen = seen.unflatten(4, (self.side, self.side)).index_select(4, place.column)
        keys, values = seen.reshape(2, rows, -1, dim_head)
        text_keys, text_values = self.text.flatten(1, 2)
        text = text_keys.shape[1]
        to_text = torch.bmm(q.reshape(groups, s, dim_head), text_keys.transpose(1, 2))
        to_image = torch.bmm(q.reshape(rows, 1, dim_head), keys.transpose(1, 2))
        scores = torch.cat([to_text, to_image.view(groups, s, -1)], dim=2).add_(place.bias[self.kind])
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores, dim=2, dtype=precise).to(q.dtype)
        out = torch.bmm(weights[:, :, :text], text_values).view(rows, 1, dim_head)
        out.baddbmm_(weights[:, :, text:].view(rows, 1, -1), values)
        return out.view(p, heads, s, dim_head)


class Caches:
    """The caches of all layers, for ``samples`` pictures of each of ``prompts`` prompts."""

    def __init__(
        self, config: DalleConfig, prompts: int, samples: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        kinds = [config.attention_kind(layer) for layer in range(config.depth)]
        text_shape = (config.depth, 2, prompts, config.heads, config.text_positions, config.dim_head)
        texts = torch.zeros(text_shape, device=device, dtype=dtype)
        self.attention = [
            KeyValueCache(config, kind, text, samples) for kind, text in zip(kinds, texts.unbind(), strict=True)
        ]
        branches = 2 * config.depth if config.shift_tokens else 0
        shift_shape = (branches, prompts * samples, 2 * (config.image_size + 1), config.dim // 4)
        self._shifts = torch.zeros(shift_shape, device=device, dtype=dtype)
        shifts = self._shifts.unbind()
        self.attention_shifts, self.feed_forward_shifts = shifts[::2], shifts[1::2]
        self.nbytes = texts.nbytes + self._shifts.nbytes + sum(layer.image.nbytes for layer in self.attention)

    def forget(self) -> None:
        """Start a new picture. Keys and values that are there are masked until they are replaced."""
        self._shifts.zero_()


def slot_count(config: DalleConfig, kind: str) -> int:
    """Image positions that a layer of this attention type keeps."""
    rows = {"axial_row": 1, "axial_col": config.image_size, "conv_like": config.conv_kernel // 2 + 1}[kind]
    return min(rows, config.image_size) * config.image_size


def _slots(config: DalleConfig, kind: str, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """The slot (N,) of each position and whether it sees each slot that it reads, (N, slots read)."""
    side = config.image_size
    line = torch.arange(side, device="cpu")
    if kind == "axial_row":
        return column, line <= column[:, None]
    if kind == "axial_col":
        return column * side + row, line <= row[:, None]
    rows = slot_count(config, kind) // side
    # Slot row i holds the newest row that is i modulo the number of rows; ahead of the column it is not yet replaced.
    held = (row[:, None] - (row[:, None] - torch.arange(rows, device="cpu")) % rows)[:, :, None]
    near = (line - column[:, None]).abs() <= config.conv_kernel // 2
    past = (held < row[:, None, None]) | (line <= column[:, None])[:, None]
    return row % rows * side + column, (near[:, None] & past & (held >= 0)).flatten(1)

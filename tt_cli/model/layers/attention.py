"""Attention patterns over a sequence of text and image codes, and attention computed by their structure.

Text positions (the start token included) attend causally to text. An image position attends to the whole text
region and to the image positions of its own row (axial_row), its own column (axial_col) or a centred window
(conv_like), none of them later in raster order than itself. One softmax runs over both groups of keys.

Notable:
- a long sequence never meets a full score matrix: image queries are grouped by row or column;
- a short one (DENSE_POSITIONS or fewer) takes one masked attention call, which is faster there;
- conv_like is the window of dalle-pytorch up to 1.4, which the paper trained. Later versions look only up and
  left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to about this many positions one dense masked call is as fast as the structured way (1 CPU thread, fp32).
DENSE_POSITIONS = 100


class AttentionPattern:
    """One attention type over ``text_positions`` positions and ``image_size`` x ``image_size`` codes."""

    def __init__(self, kind: str, text_positions: int, image_size: int, conv_kernel: int) -> None:
        self.kind = kind
        self.text_positions = text_positions
        self.image_size = image_size
        self.reach = conv_kernel // 2
        self._biases: dict[tuple[str, int, torch.device, torch.dtype], Tensor] = {}

    def mask(self, n: int) -> Tensor:
        """Boolean (n, n) on the CPU: True where the query (row) may attend to the key (column)."""
        cpu = torch.device("cpu")
        text, side = self.text_positions, self.image_size
        position = torch.arange(n, device=cpu)
        causal = position[:, None] >= position[None, :]
        is_image = position >= text
        row, column = (position - text).div(side, rounding_mode="floor"), (position - text) % side
        rows_apart = (row[:, None] - row[None, :]).abs()
        columns_apart = (column[:, None] - column[None, :]).abs()
        if self.kind == "axial_row":
            near = rows_apart == 0
        elif self.kind == "axial_col":
            near = columns_apart == 0
        else:
            near = (rows_apart <= self.reach) & (columns_apart <= self.reach)
        both_image = is_image[:, None] & is_image[None, :]
        return causal & (near | ~both_image)

    def padded_length(self, n: int) -> int:
        """Length to which ``attend`` wants n positions padded: whole image rows on the structured path."""
        return n if n <= DENSE_POSITIONS else n + (self.text_positions - n) % self.image_size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """Softmax attention of n positions.

        q, k, v: (b, heads, padded_length(n), dim_head), positions past n are padding and are never attended
        to. Returns (b, n, heads * dim_head).
        """
        if n <= self.text_positions:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif n <= DENSE_POSITIONS:
            out = self.attend_dense(q, k, v)
        else:
            out = self.attend_structured(q, k, v)[:, :, :n]
        return out.transpose(1, 2).flatten(2)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call over all pairs with a mask; q, k, v and the result are (b, heads, n, dim_head)."""
        bias = self._bias("dense", q.shape[2], q.device, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def attend_structured(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Text block, then image queries grouped by row or column; same shapes, whole image rows only."""
        text, side = self.text_positions, self.image_size
        b, heads, n, dim_head = q.shape
        rows = (n - text) // side
        text_out = F.scaled_dot_product_attention(q[:, :, :text], k[:, :, :text], v[:, :, :text], is_causal=True)
        k_text, v_text = k[:, :, :text], v[:, :, :text]
        grid = (b, heads, rows, side, dim_head)
        q_image, k_image, v_image = (x[:, :, text:].reshape(grid) for x in (q, k, v))
        if self.kind == "axial_col":
            q_image, k_image, v_image = (x.transpose(2, 3) for x in (q_image, k_image, v_image))
        elif self.kind == "conv_like":
            k_image, v_image = self._row_bands(k_image), self._row_bands(v_image)
        groups, queries = q_image.shape[2:4]
        q_image = (q_image * dim_head**-0.5).contiguous()
        flat = q_image.view(b, heads, groups * queries, dim_head)
        to_text = torch.matmul(flat, k_text.transpose(2, 3)).view(b, heads, groups, queries, text)
        to_image = torch.matmul(q_image, k_image.transpose(3, 4))
        to_image = to_image + self._bias("structured", rows, q.device, q.dtype)
        # half precision is widened to float32 inside, for the maximum, the exponentials and the sum
        weights = torch.softmax(torch.cat([to_text, to_image], dim=-1), dim=-1)
        image_out = torch.matmul(weights[..., text:], v_image)
        from_text = weights[..., :text].reshape(b, heads, groups * queries, text)
        image_out = image_out + torch.matmul(from_text, v_text).view_as(image_out)
        if self.kind == "axial_col":
            image_out = image_out.transpose(2, 3)
        return torch.cat([text_out, image_out.reshape(b, heads, rows * side, dim_head)], dim=2)

    def _row_bands(self, x: Tensor) -> Tensor:
        """(b, heads, rows, side, d) -> (b, heads, rows, (reach + 1) * side, d), rows above first."""
        rows = x.shape[2]
        padded = F.pad(x, (0, 0, 0, 0, self.reach, 0))
        return torch.cat([padded[:, :, i : i + rows] for i in range(self.reach + 1)], dim=3)

    def _bias(self, form: str, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """0 where attention is allowed and -inf elsewhere, kept per form, size, device and dtype."""
        key = (form, size, device, dtype)
        bias = self._biases.get(key)
        if bias is None:
            allowed = self.mask(size) if form == "dense" else self._group_mask(size)
            bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)
            bias = self._biases[key] = bias.to(device)
        return bias

    def _group_mask(self, rows: int) -> Tensor:
        """The keys of its group that an image query sees: (groups or 1, queries, keys), True = may attend."""
        side = self.image_size
        cpu = torch.device("cpu")
        if self.kind != "conv_like":
            length = side if self.kind == "axial_row" else rows
            return torch.ones(1, length, length, dtype=torch.bool, device=cpu).tril()
        row = torch.arange(rows, device=cpu)[:, None, None]
        column = torch.arange(side, device=cpu)[None, :, None]
        key = torch.arange((self.reach + 1) * side, device=cpu)[None, None, :]
        key_row, key_column = row - self.reach + key // side, key % side
        near = (key_column - column).abs() <= self.reach
        return (key_row >= 0) & near & ((key_row < row) | (key_column <= column))

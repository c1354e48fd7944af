"""The shape of a run's decoder without torch: the same numbers as tt_cli.model's, which tests/memory compares.

tt_cli.model imports torch, which takes seconds; whoever only asks what a run would take should not wait for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

_DENSE_POSITIONS = 100  # attention.DENSE_POSITIONS


@dataclass(frozen=True)
class Decoder:
    """As DalleConfig, whose names these are; see there."""

    dim: int
    depth: int
    heads: int
    dim_head: int
    text_vocab: int
    text_length: int
    image_size: int
    image_vocab: int
    reversible: bool
    ff_mult: int
    shared_layer_groups: int
    attention_types: tuple[str, ...]
    last_attention: str
    conv_kernel: int
    tied_embeddings: bool

    @classmethod
    def from_run(cls, run: RunConfig) -> Decoder:
        """The decoder that a run file describes."""
        model = run.model
        return cls(
            dim=model.dim,
            depth=model.depth,
            heads=model.heads,
            dim_head=model.dim_head,
            text_vocab=run.tokenizer.vocab_size,
            text_length=model.text_length,
            image_size=run.vqgan.grid,
            image_vocab=run.vqgan.codebook_size,
            reversible=model.reversible,
            ff_mult=model.ff_mult,
            shared_layer_groups=model.shared_layer_groups,
            attention_types=tuple(model.attention_types),
            last_attention=model.last_attention,
            conv_kernel=model.conv_kernel,
            tied_embeddings=model.tied_embeddings,
        )

    @property
    def text_ids(self) -> int:
        return self.text_vocab + self.text_length

    @property
    def text_positions(self) -> int:
        return self.text_length + 1

    @property
    def image_positions(self) -> int:
        return self.image_size**2

    @property
    def sequence_length(self) -> int:
        return self.text_length + self.image_positions

    @property
    def inner_dim(self) -> int:
        return self.heads * self.dim_head

    @property
    def weight_sets(self) -> int:
        return min(self.shared_layer_groups, self.depth - 1) + 1

    @property
    def padded_length(self) -> int:
        """Positions as attention pads a whole example."""
        n, text = self.sequence_length, self.text_positions
        return n if n <= _DENSE_POSITIONS or n <= text else n + (text - n) % self.image_size

    @property
    def set_sizes(self) -> list[int]:
        """Elements of each tensor of one set of weights that layers share."""
        hidden, d, inner = self.ff_mult * self.dim, self.dim, self.inner_dim
        return [3 * inner * d, d * inner, d, 2 * hidden * d, 2 * hidden, d * hidden, d]

    def sizes(self) -> list[int]:
        """Elements of each tensor of parameters."""
        vocab = self.text_ids + self.image_vocab
        own = [self.dim] * 3 * 2 * self.depth  # norm's weight and bias, LayerScale; two branches
        embedding = [] if self.tied_embeddings else [vocab * self.dim]
        return self.weight_sets * self.set_sizes + own + [self.dim] * 2 + [vocab * self.dim, vocab] + embedding

    def flops_per_sample(self) -> int:
        """As DalleConfig.flops_per_sample."""
        weights = (4 * self.inner_dim + 3 * self.ff_mult * self.dim) * self.dim
        forward = self.depth * self.sequence_length * weights
        forward += self.dim * (self.text_length * self.text_ids + self.image_positions * self.image_vocab)
        kinds = [self.attention_types[layer % len(self.attention_types)] for layer in range(self.depth - 1)]
        counts = {kind: self._attended_pairs(kind) for kind in {*kinds, self.last_attention}}
        pairs = sum(counts[kind] for kind in [*kinds, self.last_attention])
        return 6 * (forward + 2 * pairs * self.inner_dim)

    def _attended_pairs(self, kind: str) -> int:
        text, side, reach = self.text_positions, self.image_size, self.conv_kernel // 2
        pairs = text * (text + 1) // 2
        for position in range(self.image_positions - 1):
            row, column = divmod(position, side)
            left = min(column, reach) + 1
            window = min(row, reach) * (left + min(side - 1 - column, reach)) + left
            pairs += text + {"axial_row": column + 1, "axial_col": row + 1}.get(kind, window)
        return pairs

"""What a run's decoder has in memory, from its shape alone: without torch, which takes seconds to load."""

from __future__ import annotations

from dataclasses import dataclass

from tt_cli.model.dalle_config import DalleConfig

_DENSE_POSITIONS = 100  # attention.DENSE_POSITIONS


@dataclass(frozen=True)
class DecoderShape(DalleConfig):
    """The shape of a decoder, and the sizes of its tensors."""

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

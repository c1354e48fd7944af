"""The shape of a DALL-E decoder: everything that decides its parameters and its function."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

ATTENTION_KINDS = ("axial_row", "axial_col", "conv_like")
_SIZES = (
    *("dim", "depth", "heads", "dim_head", "text_vocab", "text_length", "image_size", "image_vocab"),
    *("ff_mult", "shared_layer_groups", "conv_kernel"),
)


@dataclass(frozen=True)
class DalleConfig:
    """Size and wiring of the decoder of "Training Transformers Together" (arXiv:2207.03481, section 3).

    ``text_vocab`` counts the tokenizer's ids without the ``text_length`` reserved padding ids. ``image_size``
    is the side of the square grid of codes. The last layer has its own weights and the attention
    ``last_attention``; the layers before it cycle through ``attention_types`` and through
    ``shared_layer_groups`` sets of weights.

    Raises UsageError where the values contradict each other.
    """

    dim: int
    depth: int
    heads: int
    dim_head: int
    text_vocab: int
    text_length: int
    image_size: int
    image_vocab: int
    reversible: bool = True
    ff_mult: int = 4
    rotary: bool = True
    shift_tokens: bool = True
    shared_layer_groups: int = 4
    attention_types: tuple[str, ...] = ("axial_row", "axial_col", "axial_row", "axial_row")
    last_attention: str = "conv_like"
    conv_kernel: int = 5
    tied_embeddings: bool = True
    loss_image_weight: float = 7.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention_types", tuple(self.attention_types))
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"model: {name} is {value}; it must be at least 1")
        if self.dim % 4 and self.shift_tokens:
            raise UsageError(f"model: dim is {self.dim}; the token shift needs a multiple of 4")
        if self.rotary and self.dim_head < 6:
            raise UsageError(f"model: dim_head is {self.dim_head}; rotary embeddings need at least 6")
        if self.dim_head % 2 and self.rotary:
            raise UsageError(f"model: dim_head is {self.dim_head}; rotary embeddings need an even number")
        if self.conv_kernel % 2 == 0:
            raise UsageError(f"model: conv_kernel is {self.conv_kernel}; a centred window needs an odd number")
        if not self.loss_image_weight >= 0:
            raise UsageError(f"model: loss_image_weight is {self.loss_image_weight}; it must be 0 or more")
        for kind in (*self.attention_types, self.last_attention):
            if kind not in ATTENTION_KINDS:
                raise UsageError(f"model: attention type {kind!r} is unknown; use one of {', '.join(ATTENTION_KINDS)}")
        if not self.attention_types:
            raise UsageError("model: attention_types is empty; name at least one type")
        kind_of_set: dict[int, str] = {}
        for layer in range(self.depth):
            kind = kind_of_set.setdefault(self.weight_set(layer), self.attention_kind(layer))
            if kind != self.attention_kind(layer):
                raise UsageError(
                    f"model: layer {layer} ({self.attention_kind(layer)}) would share weights with {kind};"
                    " make shared_layer_groups a multiple of the number of attention_types"
                )

    @classmethod
    def from_run(cls, run: RunConfig) -> Self:
        """The decoder that a run file describes: its model part, the tokenizer's ids, the VQGAN's codes."""
        return cls(
            text_vocab=run.tokenizer.vocab_size,
            image_size=run.vqgan.grid,
            image_vocab=run.vqgan.codebook_size,
            **run.model.model_dump(),
        )

    @property
    def text_ids(self) -> int:
        """Text ids including one reserved padding id for each text position (32,356 in the paper)."""
        return self.text_vocab + self.text_length

    @property
    def vocab(self) -> int:
        """All ids of the output: text ids first, then image codes (40,548 in the paper)."""
        return self.text_ids + self.image_vocab

    @property
    def text_positions(self) -> int:
        """Positions of the text region: the start token and the caption (257 in the paper)."""
        return self.text_length + 1

    @property
    def image_positions(self) -> int:
        """Number of codes of one picture (1,024 in the paper)."""
        return self.image_size**2

    @property
    def sequence_length(self) -> int:
        """Positions of one training example; the last code is predicted, never read (1,280 in the paper)."""
        return self.text_length + self.image_positions

    @property
    def inner_dim(self) -> int:
        """Width of queries, keys and values over all heads."""
        return self.heads * self.dim_head

    def flops_per_sample(self) -> int:
        """Floating-point operations of one example's forward and backward pass (multiply and add are two).

        Counts the matrix products: projections, the two blocks of logits, and attention over allowed pairs
        only. The backward pass needs twice the forward's; recomputation is not counted, for it is not needed.
        """
        set_weights = (4 * self.inner_dim + 3 * self.ff_mult * self.dim) * self.dim
        forward = self.depth * self.sequence_length * set_weights
        forward += self.dim * (self.text_length * self.text_ids + self.image_positions * self.image_vocab)
        kinds = Counter(map(self.attention_kind, range(self.depth)))
        pairs = sum(layers * self._attended_pairs(kind) for kind, layers in kinds.items())
        forward += 2 * pairs * self.inner_dim
        return 3 * 2 * forward

    def _attended_pairs(self, kind: str) -> int:
        """Number of (query, key) pairs of one head over one training example."""
        text, side, reach = self.text_positions, self.image_size, self.conv_kernel // 2
        pairs = text * (text + 1) // 2
        for position in range(self.image_positions - 1):
            row, column = divmod(position, side)
            pairs += text
            if kind == "axial_row":
                pairs += column + 1
            elif kind == "axial_col":
                pairs += row + 1
            else:
                left = column - max(0, column - reach) + 1
                right = min(side - 1, column + reach) - column
                pairs += min(row, reach) * (left + right) + left
        return pairs

    @property
    def set_sizes(self) -> list[int]:
        """Elements of each tensor of one set of weights that layers share."""
        hidden, d, inner = self.ff_mult * self.dim, self.dim, self.inner_dim
        return [3 * inner * d, d * inner, d, 2 * hidden * d, 2 * hidden, d * hidden, d]

    @property
    def tensor_sizes(self) -> list[int]:
        """Elements of each tensor of parameters."""
        own = [self.dim] * 3 * 2 * self.depth  # norm's weight and bias, LayerScale; two branches
        embedding = [] if self.tied_embeddings else [self.vocab * self.dim]
        head = [self.dim] * 2 + [self.vocab * self.dim, self.vocab]
        return self.weight_sets * self.set_sizes + own + head + embedding

    @property
    def effective_parameters(self) -> int:
        """Parameters, each counted in every layer that uses it."""
        return sum(self.tensor_sizes) + (self.depth - self.weight_sets) * sum(self.set_sizes)

    @property
    def weight_sets(self) -> int:
        """Number of distinct attention and feed-forward weight sets, the last layer's included."""
        return min(self.shared_layer_groups, self.depth - 1) + 1

    def weight_set(self, layer: int) -> int:
        """Index of the weight set of layer ``layer`` (counted from 0); the last layer has its own."""
        if layer == self.depth - 1:
            return self.weight_sets - 1
        return layer % self.shared_layer_groups

    def attention_kind(self, layer: int) -> str:
        """Attention type of layer ``layer`` (counted from 0)."""
        if layer == self.depth - 1:
            return self.last_attention
        return self.attention_types[layer % len(self.attention_types)]

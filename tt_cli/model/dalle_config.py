"""The shape of a DALL-E decoder: everything that decides its parameters and its function."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

NOTHING, STREAM, ALL = 0, 1, 2  # what a layer of a reversible trunk keeps for the backward pass
# Bytes of the widest activation of a branch that exist at once. On a CPU: within the cache, and below the size from
# which glibc takes every block from the system anew (32 MiB).
CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 512 << 20}
# Logits of one chunk: enough rows for efficient matrix products, few enough for a CPU's cache.
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class DalleConfig:
    """Size and wiring of the decoder of "Training Transformers Together" (arXiv:2207.03481, section 3).

    ``text_vocab`` counts the tokenizer's ids without the ``text_length`` reserved padding ids. ``image_size``
    is the side of the square grid of codes. The last layer has its own weights and the attention
    ``last_attention``; the layers before it cycle through ``attention_types`` and through
    ``shared_layer_groups`` sets of weights.

    Run files are checked where they are read (`tt_cli.run.sections.ModelPart`), for contradictions too.
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

    @classmethod
    def from_run(cls, run: RunConfig) -> Self:
        """The decoder that a run file describes: its model part, the tokenizer's ids, the VQGAN's codes."""
        from tt_cli.run import DalleRun  # the model needs torch and numpy alone

        run = DalleRun.of(run)
        return cls(
            text_vocab=run.tokenizer.vocab_size,
            image_size=run.vqgan.grid,
            image_vocab=run.vqgan.codebook_size,
            **{**run.model.model_dump(), "attention_types": tuple(run.model.attention_types)},
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

    @property
    def scores(self) -> int:
        """Scores of one example's codes over the text and their row or column, of all heads."""
        return self.heads * self.image_positions * (self.text_positions + self.image_size)

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
    def matrix_sizes(self) -> list[int]:
        """Elements of each matrix between embedding and logits."""
        return self.weight_sets * [self.set_sizes[place] for place in (0, 1, 3, 5)]

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


def keeping_plan(depth: int, stream: int, branches: int, budget: int) -> list[int]:
    """Choose what each layer of a reversible trunk keeps for the backward pass, within `budget` bytes.

    STREAM (the attention branch's input, `stream` bytes) saves a quarter of the repeated work at the least bytes; ALL
    (another stream, and the `branches` bytes that both can use again) saves nearly the rest. So streams come first,
    then whole layers, from the last one on.
    """
    plan = [NOTHING] * depth
    for level, size in ((STREAM, stream), (ALL, stream + branches)):
        for layer in reversed(range(depth)):
            if size > budget:
                return plan
            plan[layer], budget = level, budget - size
    return plan

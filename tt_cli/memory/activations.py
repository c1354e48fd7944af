"""Memory of one forward and backward pass beside parameters and gradients, from the order in which the model works.

Follows tt_cli.model.dalle: the trunk keeps what its budget allows; then the largest of its moments counts, which
are the head (tt_cli.model.losses) and every layer's two branches on the way back (model/layers/blocks.py). A stream is
b * n * dim float32 values; most of what lives at a moment is counted in those. tests/memory compares with what torch
allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from tt_cli.model.dalle_config import ALL, CHUNK_BYTES, CHUNK_LOGITS, STREAM, DalleConfig, keeping_plan

_DENSE_POSITIONS = 100  # attention.DENSE_POSITIONS
_PRODUCT = 1 << 21  # products._BLOCK_ELEMENTS; a CPU widens a part before it is added
# Matrices of attention scores that one part of a batch holds at once on its way back, by how it is computed.
_SCORES = {"dense": 3.0, "structured": 4.5}


@dataclass(frozen=True)
class Activations:
    """Bytes: kept for the backward pass, and held at the worst moment beside that. casts: of weights, all the while."""

    kept: int
    workspace: int
    casts: int

    @property
    def total(self) -> int:
        """At the worst moment."""
        return self.kept + self.workspace + self.casts


def activations(config: DalleConfig, b: int, itemsize: int, budget: int, kind: str) -> Activations:
    """Count for `b` examples, products of `itemsize` bytes and `budget` bytes to keep, on a device of this kind."""
    if not config.reversible:
        return _of_autograd(config, b, itemsize, kind)
    moment = _Moment(config, b, itemsize, kind)
    stream = moment.stream
    plan = keeping_plan(config.depth, stream, moment.whole_layer, budget)
    sizes = [(0, stream, 2 * stream + moment.whole_layer)[level] for level in plan]
    kept = sum(sizes)
    worst, below = kept + moment.head(ends=2 - (plan[-1] == ALL)), kept
    for i in reversed(range(config.depth)):
        everything, streams = plan[i] == ALL, plan[i] >= STREAM
        left_over = 0 if i == config.depth - 1 else stream + (0 if everything else moment.low)  # of the layer above
        worst = max(worst, below + left_over + moment.feed_forward(everything, streams))
        want = i > 0 and plan[i - 1] < ALL
        worst = max(worst, below + moment.attention(everything, streams, want))
        below -= sizes[i]
    sets = config.weight_sets * sum(config.set_sizes)
    return Activations(kept, worst - kept, sets * itemsize if itemsize != 4 else 0)


def _padded_length(config: DalleConfig) -> int:
    """Positions as attention pads a whole example."""
    n, text = config.sequence_length, config.text_positions
    return n if n <= _DENSE_POSITIONS else n + (text - n) % config.image_size


class _Moment:
    """Bytes beside what is kept, at each kind of moment."""

    def __init__(self, config: DalleConfig, b: int, itemsize: int, kind: str) -> None:
        self.config, self.b, self.itemsize, self.kind = config, b, itemsize, kind
        self.rows = b * config.sequence_length
        self.stream = 4 * self.rows * config.dim
        self.low = itemsize * self.rows * config.dim  # a stream in the products' dtype
        # all that both branches of a layer can use again (blocks.kept_bytes), beside streams
        heads = 3 * b * _padded_length(config) * config.inner_dim
        self.whole_layer = itemsize * (heads + 2 * self.rows * config.ff_mult * config.dim)
        # a branch's normed input, the incoming gradient times LayerScale (and as it is, when narrower), d/dh
        self.branch = 2 * self.low + (self.stream if itemsize == 4 else 2 * self.low)

    def head(self, ends: int) -> int:
        """While a loss is computed; embeddings, the trunk's ends, their mean, its norm and that gradient are held."""
        config, worst = self.config, 0
        for positions, ids in ((config.text_length, config.text_ids), (config.image_positions, config.image_vocab)):
            rows = self.b * positions
            copies = 4 * rows * config.dim * (2 if self.b > 1 else 1)
            logits = min(rows, max(1, CHUNK_LOGITS[self.kind] // ids)) * ids
            if self.itemsize == 4:
                worst = max(worst, copies + 4 * logits)
            else:  # the weight's copy; then two products of logits, or one and a part of the weight's gradient
                matrix = ids * config.dim
                part = min(matrix, _PRODUCT) * (self.itemsize + 4) if self.kind == "cpu" else matrix * self.itemsize
                widest = (4 + self.itemsize) * logits + max(self.itemsize * logits, part)
                worst = max(worst, copies + widest + self.itemsize * matrix)
        return worst + (4 + ends) * self.stream

    def feed_forward(self, everything: bool, streams: bool) -> int:
        """On the way back through a feed-forward branch.

        The trunk holds five streams (its mean, three gradients and the head's), and the ends that it rebuilds from.
        """
        hidden, d = self.config.ff_mult * self.config.dim, self.config.dim
        held = (6 if everything else 7) * self.stream + (0 if streams else self.low)
        widest = 2 * hidden * self.itemsize
        parts = max(1, -(-self.rows * widest // CHUNK_BYTES[self.kind]))
        chunk = -(-self.rows // parts) * widest * (2 if everything else 3)
        own = 4 * d * hidden  # the weight's gradient, multiplied with the weight, which may be widened for that
        return held + self.branch + own + max(chunk, 2 * self.stream, own if self.itemsize == 4 else 2 * own)

    def attention(self, everything: bool, streams: bool, want: bool) -> int:
        """On the way back through an attention branch."""
        config = self.config
        n, inner = config.sequence_length, config.inner_dim
        padded = _padded_length(config)
        heads = self.itemsize * inner * self.b
        held = (6 if everything else 7 if streams else 8) * self.stream + (0 if streams else self.low) + self.branch
        held += 0 if everything else 3 * heads * padded
        scores = config.scores * self.itemsize
        at_once = min(self.b, max(1, CHUNK_BYTES[self.kind] // scores))
        part = self.itemsize * inner * at_once
        if padded == n and n <= _DENSE_POSITIONS:
            matrix, form = config.heads * n * n * self.itemsize * at_once, "dense"
        else:
            matrix, form = scores * at_once, "structured"
        done = 3 * heads * n - 3 * part * n
        into = heads * n + heads * n  # d/d attended, and attended
        attending = done + into + part * padded * 4 + int(_SCORES[form] * matrix)
        # half precision is rotated in float32: a copy and the result
        wide = 0 if self.itemsize == 4 else 2 * 3 * n * part * 4 // self.itemsize
        joining = done + into + part * (2 * 3 * padded + 3 * n) + wide
        ending = 6 * heads * n + 3 * part * padded + into + heads * n + 2 * self.stream + (self.low if want else 0)
        return held + max(attending, joining, ending) + 4 * config.dim * inner


def _of_autograd(config: DalleConfig, b: int, itemsize: int, kind: str) -> Activations:
    """A trunk that is not reversible keeps every layer's activations; an estimate."""
    rows = b * config.sequence_length
    stream, low = 4 * rows * config.dim, itemsize * rows * config.dim
    inner, hidden = itemsize * rows * config.inner_dim, itemsize * rows * config.ff_mult * config.dim
    layer = 3 * stream + low + 5 * inner + 3 * hidden
    if config.sequence_length > _DENSE_POSITIONS:
        layer += 3 * config.scores * itemsize * b
    moment = _Moment(config, b, itemsize, kind)
    return Activations(config.depth * layer, max(moment.head(1), 4 * hidden + 4 * stream), 0)

"""What one forward and backward pass takes beside parameters and gradients, from the order in which the model works.

Follows tt_cli.model.training: the trunk keeps what its budget allows; then the largest of its moments counts, which
are the head (tt_cli.model.losses) and every layer's two branches on the way back (tt_cli.model.blocks). A stream is
b * n * dim float32 values; most of what lives at a moment is counted in those. tests/memory compares with what torch
allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.model import Dalle, DalleConfig

_CHUNK = {"cpu": 24 << 20, "cuda": 512 << 20}  # blocks._CHUNK_BYTES
_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # losses._CHUNK_ELEMENTS
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


def activations(model: Dalle, b: int, itemsize: int, budget: int, kind: str) -> Activations:
    """Of `b` examples with products of `itemsize` bytes and `budget` bytes to keep, on a device of this kind.

    model: may lie on the meta device.
    """
    if not model.config.reversible:
        return _of_autograd(model.config, b, itemsize, kind)
    import torch

    from tt_cli.model.reversible import Half, keeping_plan

    config = model.config
    n, d = config.sequence_length, config.dim
    x = torch.empty(b, n, d, device="meta")
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    layers = [
        (
            Half(model.attention_branches[config.attention_kind(i)], [], []),
            Half(model.feed_forward_branch, [], []),
        )
        for i in range(config.depth)
    ]
    plan = keeping_plan(layers, x, dtype, budget)
    stream = x.nbytes
    sizes = [
        (0, stream, 2 * stream + sum(half.branch.kept_bytes(b, n, dtype) for half in halves))[level]
        for level, halves in zip(plan, layers, strict=True)
    ]
    sets = sum(p.numel() for part in (model.attention, model.feed_forward) for p in part.parameters())
    moment = _Moment(config, b, itemsize, kind)
    kept = sum(sizes)
    worst, below = kept + moment.head(ends=2 - (plan[-1] == 2)), kept
    for i in reversed(range(config.depth)):
        everything, streams = plan[i] == 2, plan[i] >= 1
        left_over = 0 if i == config.depth - 1 else stream + (0 if everything else moment.low)  # of the layer above
        worst = max(worst, below + left_over + moment.feed_forward(everything, streams))
        want = i > 0 and plan[i - 1] < 2
        worst = max(worst, below + moment.attention(model, config.attention_kind(i), everything, streams, want))
        below -= sizes[i]
    return Activations(kept, worst - kept, sets * itemsize if itemsize != 4 else 0)


@dataclass(frozen=True)
class _Moment:
    """Bytes beside what is kept, at each kind of moment."""

    config: DalleConfig
    b: int
    itemsize: int
    kind: str

    @property
    def rows(self) -> int:
        return self.b * self.config.sequence_length

    @property
    def stream(self) -> int:
        return 4 * self.rows * self.config.dim

    @property
    def low(self) -> int:
        """A stream in the products' dtype."""
        return self.itemsize * self.rows * self.config.dim

    @property
    def branch(self) -> int:
        """A branch's normed input, the incoming gradient times LayerScale (and as it is, when narrower), d/dh."""
        return 2 * self.low + (self.stream if self.itemsize == 4 else 2 * self.low)

    def head(self, ends: int) -> int:
        """While a loss is computed; embeddings, the trunk's ends, their mean, its norm and that gradient are held."""
        config, worst = self.config, 0
        for positions, ids in ((config.text_length, config.text_ids), (config.image_positions, config.image_vocab)):
            rows = self.b * positions
            copies = 4 * rows * config.dim * (2 if self.b > 1 else 1)
            logits = min(rows, max(1, _LOGITS[self.kind] // ids)) * ids
            if self.itemsize == 4:
                worst = max(worst, copies + 4 * logits)
            else:
                worst = max(worst, copies + (4 + 2 * self.itemsize) * logits + self.itemsize * ids * config.dim)
        return worst + (4 + ends) * self.stream

    def feed_forward(self, everything: bool, streams: bool) -> int:
        """On the way back through a feed-forward branch.

        The trunk holds five streams (its mean, three gradients and the head's), and the ends that it rebuilds from.
        """
        hidden, d = self.config.ff_mult * self.config.dim, self.config.dim
        held = (6 if everything else 7) * self.stream + (0 if streams else self.low)
        widest = 2 * hidden * self.itemsize
        parts = max(1, -(-self.rows * widest // _CHUNK[self.kind]))
        chunk = -(-self.rows // parts) * widest * (2 if everything else 3)
        own = (
            4 * d * hidden
        )  # the weight's gradient of its own, multiplied with the weight, which may be widened for that
        return held + self.branch + own + max(chunk, 2 * self.stream, own if self.itemsize == 4 else 2 * own)

    def attention(self, model: Dalle, name: str, everything: bool, streams: bool, want: bool) -> int:
        """On the way back through an attention branch."""
        config, pattern = self.config, model.attention_branches[name].pattern
        n, inner = config.sequence_length, config.inner_dim
        padded = pattern.padded_length(n)
        heads = self.itemsize * inner * self.b
        held = (6 if everything else 7 if streams else 8) * self.stream + (0 if streams else self.low) + self.branch
        held += 0 if everything else 3 * heads * padded
        scores = config.heads * config.image_positions * (config.text_positions + config.image_size) * self.itemsize
        at_once = min(self.b, max(1, _CHUNK[self.kind] // scores))
        part = self.itemsize * inner * at_once
        if padded == n and n <= 100:
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
    matrix = config.heads * config.image_positions * (config.text_positions + config.image_size) * itemsize * b
    if config.sequence_length > 100:
        layer += 3 * matrix
    moment = _Moment(config, b, itemsize, kind)
    return Activations(config.depth * layer, max(moment.head(1), 4 * hidden + 4 * stream), 0)

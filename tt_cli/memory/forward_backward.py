"""One micro-batch's forward and backward pass of each architecture, played on a tape.

What is allocated, kept and freed follows the classes of transformers as torch runs them. In mixed precision products
run in 16 bits under autocast, whose casts of weights live until the forward pass is over; the stream, norms and losses
stay in float32. scripts/bench memory_model compares with what torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable

from tt_cli.memory.architectures import Architecture
from tt_cli.memory.operations import Operations
from tt_cli.memory.question import CalculatorOptions
from tt_cli.memory.tape import Storage, Tape, Value


def play(model: Architecture, options: CalculatorOptions) -> Tape:
    """The tape of one micro-batch: its peak is what the passes take beside weights and their summed gradients."""
    o = Operations(model, options)
    ids = o.t.value(2 * o.b * o.n, 8, "embeddings")  # int64: tokens and labels
    _t5(o) if model.family == "t5" else _one_stack(o)
    o.casts.clear()
    if options.layers == "kept":  # else every layer keeps it for its repetition
        o.masks.clear()
    o.t.backward()
    del ids
    return o.t


def _one_stack(o: Operations) -> Value:
    model, layer = o.model, {"gpt": _gpt_layer, "gptj": _gptj_layer, "bert": _bert_layer}[o.model.family]
    x = o.embed(o.n)
    if model.positions:
        x = o.add(x, o.table(o.n, model.positions))
    if model.family == "bert":
        x = o.norm(x)
    x = o.dropout(x, "embeddings")
    if model.family != "bert":
        _mask(o, o.n)
    x = _stack(o, model.layers, lambda x, i: layer(o, x, i), x)
    if model.family == "bert":
        x = o.gelu(o.linear(x, (model.dim, model.dim), "logits", "head"), "logits")
    return o.head(o.norm(x))


def _stack(o: Operations, layers: int, layer: Callable[[Value, int], Value], x: Value) -> Value:
    """The layers, each kept, checkpointed or reversible."""
    repeated, reversible = o.s.layers != "kept", o.s.layers == "reversible"
    other = o.t.value(x.count, x.item, "norms and residuals") if reversible else None
    for i in range(layers):

        def function(x: Value, index: int = i % o.s.groups if o.s.groups else i) -> Value:
            out, o.weights = layer(x, index), None
            if repeated and o.t.recording:  # on the way back: autocast forgets its copies after each layer
                o.casts.clear()
            return out

        x = o.t.checkpoint(function, x, reversible=reversible) if repeated else function(x)
    return o.add(x, other) if other else x


# -- layers --


def _projected(o: Operations, h: Value, i: object) -> tuple[Value, Value, Value]:
    """Queries, keys and values, each with a matrix of its own."""
    q, k, v = (o.linear(h, (o.model.dim, o.model.inner), "attention", (i, name)) for name in "qkv")
    return q, k, v


def _joined(o: Operations, attended: Value, i: object) -> Value:
    return o.linear(attended, (o.model.inner, o.model.dim), "attention", (i, "out"))


def _feed_forward(o: Operations, h: Value, i: object, activation: Callable[[Value], Value]) -> Value:
    """Expansion, activation, contraction."""
    h = o.linear(h, (o.model.dim, o.model.hidden), "feed-forward", (i, "up"))
    h = activation(h)
    return o.linear(h, (o.model.hidden, o.model.dim), "feed-forward", (i, "down"))


def _gpt_layer(o: Operations, x: Value, i: int) -> Value:
    h = o.norm(x)
    qkv = o.linear(h, (o.model.dim, 3 * o.model.inner), "attention", (i, "qkv"))
    del h
    out = o.attend_qkv(qkv)
    out = o.dropout(_joined(o, out, i), "attention")
    x = o.add(out, x)
    del out
    return o.add(x, o.dropout(_feed_forward(o, o.norm(x), i, o.gelu_new), "feed-forward"))


def _gptj_layer(o: Operations, x: Value, i: int) -> Value:
    normed = o.norm(x)
    q, k, v = _projected(o, normed, i)
    q, k = o.rotated(q), o.rotated(k)
    q, k = o.widened(q), o.widened(k)
    out = o.attend(q, k, v, o.n, o.n, masked=True)
    del q, k, v
    attended = _joined(o, out, i)
    del out
    h = _feed_forward(o, normed, i, o.gelu_new)
    return o.add(o.add(attended, h), x)


def _bert_layer(o: Operations, x: Value, i: int) -> Value:
    q, k, v = _projected(o, x, i)
    out = o.attend(q, k, v, o.n, o.n, masked=False)
    del q, k, v
    out = o.dropout(_joined(o, out, i), "attention")
    x = o.norm(o.add(out, x))
    del out
    return o.norm(o.add(o.dropout(_feed_forward(o, x, i, o.gelu), "feed-forward"), x))


def _mask(o: Operations, n: int) -> None:
    """The attention mask as numbers to add; fused attention is told in a word."""
    if o.s.attention == "eager":
        o.masks.append(Storage(o.t, o.b * n * n * o.full, "attention"))


# -- T5 --


def _t5(o: Operations) -> Value:
    model, m = o.model, o.model.targets(o.s.sequence)
    x = o.dropout(o.embed(o.n), "embeddings")
    bias = _bias(o, o.n, o.n, o.full)
    x = _stack(o, model.layers, lambda x, i: _t5_layer(o, x, ("e", i), o.n, bias, None, None), x)
    seen = o.dropout(o.rms_norm(x), "norms and residuals")
    del x
    y = o.dropout(o.embed(m), "embeddings")
    _mask(o, m)
    own, cross = _bias(o, m, m, o.full), _bias(o, m, o.n, o.low)
    y = _stack(o, model.decoder_layers, lambda y, i: _t5_layer(o, y, ("d", i), m, own, seen, cross), y)
    y = o.dropout(o.rms_norm(y), "norms and residuals")
    return o.head(o.mapped(y, "logits"))  # scaled


def _t5_layer(
    o: Operations, x: Value, i: object, n: int, bias: Value, seen: Value | None, cross: Value | None
) -> Value:
    d, inner = o.model.dim, o.model.inner
    q, k, v = _projected(o, o.rms_norm(x), i)
    out = o.attend(q, k, v, n, n, masked=seen is not None, bias=bias)
    del q, k, v
    x = o.add(x, o.dropout(_joined(o, out, i), "attention"))
    del out
    if seen is not None:
        q = o.linear(o.rms_norm(x), (d, inner), "attention", (i, "cross q"))
        k, v = (o.linear(seen, (d, inner), "attention", (i, f"cross {name}")) for name in "kv")
        out = o.attend(q, k, v, n, o.n, masked=False, bias=cross)
        del q, k, v
        x = o.add(x, o.dropout(o.linear(out, (inner, d), "attention", (i, "cross out")), "attention"))
        del out
    h = _feed_forward(o, o.rms_norm(x), i, lambda h: o.dropout(o.relu(h), "feed-forward"))
    return o.add(x, o.dropout(h, "feed-forward"))


def _bias(o: Operations, n: int, m: int, item: int) -> Value:
    """Relative positions: one (heads, n, m) matrix for all layers and examples."""
    return o.t.value(o.model.heads * n * m, item, "attention")

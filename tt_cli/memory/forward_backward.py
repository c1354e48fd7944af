"""One micro-batch's forward and backward pass of each architecture, played on a tape.

What is allocated, kept and freed follows the classes of transformers as torch runs them. In mixed precision products
run in 16 bits under autocast, whose casts of weights live until the forward pass is over; the stream, norms and losses
stay in float32. scripts/bench memory_model compares with what torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable

from tt_cli.memory.architectures import Architecture
from tt_cli.memory.operations import Operations, Setting
from tt_cli.memory.tape import Storage, Tape, Value


def play(model: Architecture, setting: Setting) -> Tape:
    """The tape of one micro-batch: its peak is what the passes take beside weights and their summed gradients."""
    return _run(Operations(model, setting))


# -- the whole --


def _run(o: Operations) -> Tape:
    ids = o.t.value(2 * o.b * o.n, 8, "embeddings")  # int64: tokens and labels
    _t5(o) if o.model.family == "t5" else _one_stack(o)
    o.casts.clear()
    if o.s.layers == "kept":  # else every layer keeps it for its repetition
        o.masks.clear()
    o.t.backward()
    del ids
    return o.t


def _one_stack(o: Operations) -> Value:
    model, layer = o.model, {"gpt": _gpt_layer, "gptj": _gptj_layer, "bert": _bert_layer}[o.model.family]
    x = o.embed(o.n)
    if model.positions:
        x = o.add(x, o.table(o.n))
    if model.family == "bert":
        x = o.norm(x)
    x = o.dropout(x, "embeddings")
    if model.family != "bert":
        _mask(o, o.n)
    x = _stack(o, model.layers, lambda x, i: layer(o, x, i), x)
    if model.family == "bert":
        x = o.linear(x, (model.dim, model.dim), "logits", "head")
        x = o.gelu(x, "logits")
    return o.head(o.norm(x))


def _stack(o: Operations, layers: int, layer: Callable[[Value, int], Value], x: Value) -> Value:
    """The layers, each kept, checkpointed or reversible."""
    if o.s.layers == "reversible":
        other = o.t.same(o.t.value(x.count, x.item, "norms and residuals"))
    for i in range(layers):
        shared = i % o.s.groups if o.s.groups else i

        def function(x: Value, index: int = shared) -> Value:
            out, o.weights = layer(x, index), None
            if o.t.recording:  # repeated on the way back: autocast forgets its copies after each layer
                o.casts.clear()
            return out

        if o.s.layers == "kept":
            x, o.weights = layer(x, shared), None
        elif o.s.layers == "checkpointed":
            x = o.t.checkpoint(function, x)
        else:
            x = o.t.reversible(function, x)
    if o.s.layers == "reversible":
        x = o.add(x, other)
    return x


# -- layers --


def _gpt_layer(o: Operations, x: Value, i: int) -> Value:
    d, inner = o.model.dim, o.model.inner
    h = o.norm(x)
    qkv = o.linear(h, (d, 3 * inner), "attention", (i, "qkv"))
    del h
    out = o.attend_qkv(qkv)
    out = o.dropout(o.linear(out, (inner, d), "attention", (i, "out")), "attention")
    x = o.add(out, x)
    del out
    h = o.linear(o.norm(x), (d, o.model.hidden), "feed-forward", (i, "up"))
    h = o.gelu_new(h)
    h = o.dropout(o.linear(h, (o.model.hidden, d), "feed-forward", (i, "down")), "feed-forward")
    return o.add(x, h)


def _gptj_layer(o: Operations, x: Value, i: int) -> Value:
    d, inner = o.model.dim, o.model.inner
    normed = o.norm(x)
    q, k, v = (o.linear(normed, (d, inner), "attention", (i, name)) for name in "qkv")
    q, k = o.rotated(q), o.rotated(k)
    q, k = o.widened(q), o.widened(k)
    out = o.attend(q, k, v, o.n, o.n, masked=True)
    del q, k, v
    attended = o.linear(out, (inner, d), "attention", (i, "out"))
    del out
    h = o.linear(normed, (d, o.model.hidden), "feed-forward", (i, "up"))
    h = o.linear(o.gelu_new(h), (o.model.hidden, d), "feed-forward", (i, "down"))
    return o.add(o.add(attended, h), x)


def _bert_layer(o: Operations, x: Value, i: int) -> Value:
    d, inner = o.model.dim, o.model.inner
    q, k, v = (o.linear(x, (d, inner), "attention", (i, name)) for name in "qkv")
    out = o.attend(q, k, v, o.n, o.n, masked=False)
    del q, k, v
    out = o.dropout(o.linear(out, (inner, d), "attention", (i, "out")), "attention")
    x = o.norm(o.add(out, x))
    del out
    h = o.gelu(o.linear(x, (d, o.model.hidden), "feed-forward", (i, "up")), "feed-forward")
    h = o.dropout(o.linear(h, (o.model.hidden, d), "feed-forward", (i, "down")), "feed-forward")
    return o.norm(o.add(h, x))


def _mask(o: Operations, n: int) -> None:
    """The attention mask as numbers to add; fused attention is told in a word."""
    if o.s.attention == "eager":
        o.masks.append(Storage(o.t, o.b * n * n * o.full, "attention"))


# -- T5 --


def _t5(o: Operations) -> Value:
    model = o.model
    m = model.target if not o.s.sequence else max(1, o.s.sequence * model.target // model.sequence)
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
    return o.head(o.scale(y, "logits"))


def _t5_layer(
    o: Operations, x: Value, i: object, n: int, bias: Value, seen: Value | None, cross: Value | None
) -> Value:
    d, inner = o.model.dim, o.model.inner
    h = o.rms_norm(x)
    q, k, v = (o.linear(h, (d, inner), "attention", (i, name)) for name in "qkv")
    out = o.attend(q, k, v, n, n, masked=seen is not None, bias=bias)
    del q, k, v, h
    x = o.add(x, o.dropout(o.linear(out, (inner, d), "attention", (i, "out")), "attention"))
    del out
    if seen is not None:
        q = o.linear(o.rms_norm(x), (d, inner), "attention", (i, "cross q"))
        k, v = (o.linear(seen, (d, inner), "attention", (i, f"cross {name}")) for name in "kv")
        out = o.attend(q, k, v, n, o.n, masked=False, bias=cross)
        del q, k, v
        x = o.add(x, o.dropout(o.linear(out, (inner, d), "attention", (i, "cross out")), "attention"))
        del out
    h = o.linear(o.rms_norm(x), (d, o.model.hidden), "feed-forward", (i, "up"))
    h = o.dropout(o.relu(h), "feed-forward")
    h = o.linear(h, (o.model.hidden, d), "feed-forward", (i, "down"))
    return o.add(x, o.dropout(h, "feed-forward"))


def _bias(o: Operations, n: int, m: int, item: int) -> Value:
    """Relative positions: one (heads, n, m) matrix for all layers and examples."""
    return o.t.value(o.model.heads * n * m, item, "attention")

"""The operations of a pass on a tape: what each allocates, keeps for the backward pass, and gives back there.

Follows torch's own formulas for its derivatives and the modules of transformers, one function here for one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tt_cli.memory.architectures import Architecture
from tt_cli.memory.tape import Gradients, Storage, Tape, Value

Kind = Literal["cpu", "cuda"]
Precision = Literal["fp32", "mixed", "pure16"]
Attention = Literal["eager", "fused"]
Layers = Literal["kept", "checkpointed", "reversible"]

CASTS = "16-bit copies of weights"


@dataclass(frozen=True)
class Setting:
    """All that a pass depends on beside the architecture. groups: distinct layers, 0 for all."""

    kind: Kind = "cuda"
    precision: Precision = "mixed"
    attention: Attention = "fused"
    layers: Layers = "kept"
    micro_batch: int = 1
    sequence: int = 0
    groups: int = 0
    tied: bool | None = None


class Operations:
    """Those of one model under one setting, on one tape."""

    def __init__(self, model: Architecture, setting: Setting) -> None:
        self.model, self.s, self.t = model, setting, Tape()
        self.b, self.n = setting.micro_batch, setting.sequence or model.sequence
        self.cuda = setting.kind == "cuda"
        self.mixed = setting.precision == "mixed"
        self.full = 2 if setting.precision == "pure16" else 4  # bytes of a value of the stream
        self.low = 4 if setting.precision == "fp32" else 2  # … of a product
        self.casts: dict[object, Storage] = {}
        self.masks: list[Storage] = []
        self.weights: Value | None = None  # of the last attention: a layer refers to them until it ends

    # -- attention --

    def attend_qkv(self, qkv: Value) -> Value:
        """Attention from one storage of queries, keys and values (b, n, 3 inner)."""
        count = qkv.count // 3
        if self.s.attention == "fused":
            return self.fused([qkv], count, self.n)
        views = [self.view(qkv, count) for _ in range(3)]
        del qkv
        q, k, v = views
        views.clear()
        return self.eager(q, k, v, self.n, self.n, masked=True, bias=None)

    def attend(self, q: Value, k: Value, v: Value, n: int, m: int, *, masked: bool, bias: Value | None = None) -> Value:
        if self.s.attention == "fused":
            return self.fused([q, k, v], q.count, n)
        return self.eager(q, k, v, n, m, masked=masked, bias=bias)

    def fused(self, parts: list[Value], count: int, n: int) -> Value:
        """Flash attention (Dao et al. 2022): keeps its inputs, its result and one float32 of each row of scores."""
        out = self.t.value(count, self.low, "attention")
        rows = self.t.value(self.b * self.model.heads * n, 4, "attention")
        sizes = [part.size for part in parts]
        keep = [part.storage for part in parts] + [out.storage, rows.storage]

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            # the three gradients, then joined where they came from one storage
            given = [self.t.work(sum(sizes) // 3) for _ in range(3)]
            return given if len(sizes) == 3 else [self.t.work(sizes[0])]

        return self.t.record(out, parts, keep, back)

    def eager(self, q: Value, k: Value, v: Value, n: int, m: int, *, masked: bool, bias: Value | None) -> Value:
        """All scores, their softmax and its dropout as matrices."""
        model = self.model
        pairs = self.b * model.heads * n * (min(m, model.keys) if model.keys else m)
        v = self.halved(v)
        if model.family != "gptj" or self.mixed:  # which widens them, unless autocast decides
            q, k = self.halved(q), self.halved(k)
        q, k = self.contiguous(q), self.contiguous(k)
        scores = self.product(q, k, pairs)
        del q, k
        scores = self.scale(scores, "attention")
        if bias is not None:
            scores = self.plus(scores, bias.item, bias)
        if masked:
            scores = self.plus(scores, self.full)
        weights = self.softmax(scores)
        del scores
        if model.family in ("gpt", "gptj"):
            weights = self.halved(weights)
        weights = self.weights = self.dropout(weights, "attention")
        v = self.contiguous(v)
        out = self.product(self.halved(weights), v, self.b * n * model.inner)
        del weights, v
        return self.contiguous(out, always=True)

    # -- operations --

    def embed(self, n: int) -> Value:
        """Rows of the vocabulary's matrix, whose gradient is of the whole matrix."""
        return self.table(n, self.model.vocab, self.b)

    def table(self, n: int, rows: int = 0, b: int = 1) -> Value:
        x = self.t.value(b * n * self.model.dim, self.full, "embeddings")
        size = (rows or self.model.positions) * self.model.dim * self.full

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            self.t.work(size)
            return []

        return self.t.record(x, [], [], back)

    def norm(self, x: Value) -> Value:
        """LayerNorm: keeps its input and two numbers a row."""
        rows = Storage(self.t, 8 * x.count // self.model.dim, "norms and residuals")
        return self.mapped(x, "norms and residuals", self.exact(x), [x.storage, rows])

    def exact(self, x: Value) -> int:
        """Bytes of a value of what autocast computes in float32, on a GPU."""
        return 4 if self.mixed and self.cuda else x.item

    def rms_norm(self, x: Value) -> Value:
        """T5's, of single operations: keeps its input, x / rms, and the input in float32 where it is narrower."""
        wide = [] if x.item == 4 else [Storage(self.t, 4 * x.count, "norms and residuals")]
        normed = self.t.value(x.count, x.item, "norms and residuals")
        squared = self.t.value(x.count, 4, "norms and residuals")
        del squared
        out = self.t.value(x.count, x.item, "norms and residuals")
        size = x.size

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            first = self.t.work(size)
            second = self.t.work(size)
            del first
            return [second]

        return self.t.record(out, [x], [x.storage, normed.storage, *wide], back)

    def linear(self, x: Value, shape: tuple[int, int], label: str, weight: object) -> Value:
        """x W + b with W of this shape: keeps x, in 16 bits under autocast, and the weight's copy of that."""
        x = self.halved(x)
        count, item, (inner, width) = x.count, x.item, shape
        numel = inner * width
        out = self.t.value(count // inner * width, item, label)
        keep = [x.storage]
        if self.mixed:
            keep.append(self.cast(weight, numel))

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            into = self.t.work(count * item)
            own = self.t.work(numel * item)
            if self.mixed:
                wide = self.t.work(numel * 4)
                del wide
            del own
            return [into]

        return self.t.record(out, [x], keep, back)

    def cast(self, weight: object, numel: int) -> Storage:
        if weight not in self.casts:
            self.casts[weight] = Storage(self.t, 2 * numel, CASTS)
        return self.casts[weight]

    def halved(self, x: Value) -> Value:
        """A copy in the products' type, where x is wider."""
        if x.item <= self.low:
            return x
        return self.converted(x, self.low)

    def widened(self, x: Value) -> Value:
        return x if x.item == 4 else self.converted(x, 4)

    def converted(self, x: Value, item: int) -> Value:
        return self.mapped(x, "attention", item)

    def mapped(
        self, x: Value, label: str, item: int = 0, keep: Sequence[Storage] = (), *, keep_result: bool = False
    ) -> Value:
        """One value of `item` bytes (0: as many as before) for each of x; a gradient of x's size on the way back."""
        out = self.t.value(x.count, item or x.item, label)
        size = x.size
        kept = [out.storage] if keep_result else keep
        return self.t.record(out, [x], kept, lambda g, kept: [self.t.work(size)])

    def add(self, a: Value, b: Value) -> Value:
        """A residual: keeps nothing, and both take the same gradient."""
        out = self.t.value(max(a.count, b.count), max(a.item, b.item), "norms and residuals")
        narrow = [value.size if value.item < out.item else 0 for value in (a, b)]

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            return [self.t.work(size) if size else g for size in narrow]

        return self.t.record(out, [a, b], [], back)

    def plus(self, x: Value, item: int, bias: Value | None = None) -> Value:
        """Add a mask or a bias, whose gradient is the sum over all examples."""
        out = self.t.value(x.count, max(x.item, item), "attention")
        narrow, learned = x.size if x.item < out.item else 0, bias.size if bias else 0

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            given = [self.t.work(narrow) if narrow else g]
            return [*given, self.t.work(learned)] if learned else given

        return self.t.record(out, [x, bias] if bias else [x], [], back)

    def scale(self, x: Value, label: str) -> Value:
        return self.mapped(x, label)

    def dropout(self, x: Value, label: str) -> Value:
        """Keeps which values stay: a byte each on a GPU, their own type on a CPU."""
        if not self.model.dropout:
            return x
        return self.mapped(x, label, keep=[Storage(self.t, x.count * (1 if self.cuda else x.item), label)])

    def gelu(self, x: Value, label: str) -> Value:
        """One operation: keeps its input."""
        return self.mapped(x, label, keep=[x.storage])

    def relu(self, x: Value) -> Value:
        """Keeps its result."""
        return self.mapped(x, "feed-forward", keep_result=True)

    def gelu_new(self, x: Value) -> Value:
        """GPT's, of single operations: 0.5 x (1 + tanh(c (x + 0.044715 x^3))). Keeps x, x / 2, tanh and 1 + tanh."""
        wide = self.exact(x)  # of powers
        powers = Storage(self.t, x.count * 4, "feed-forward") if wide > x.item else None
        half = Storage(self.t, x.size, "feed-forward")
        cube = Storage(self.t, x.count * wide, "feed-forward")
        inside = Storage(self.t, x.count * wide, "feed-forward")
        del cube
        tanh = Storage(self.t, x.count * wide, "feed-forward")
        del inside
        plus = Storage(self.t, x.count * wide, "feed-forward")
        out = self.t.value(x.count, wide, "feed-forward")
        keep = [x.storage, half, tanh, plus, *([powers] if powers else [])]
        size, width = x.size, x.count * wide

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            first = self.t.work(size)
            inner = self.t.work(width)
            kept[1:2], kept[-1:] = [], []
            third = self.t.work(width)
            fourth = self.t.work(width)
            del inner, third, fourth
            return [first]

        return self.t.record(out, [x], keep, back)

    def rotated(self, x: Value) -> Value:
        """GPT-J's rotary embedding of some of each head's values: joined with the others anew."""
        return self.mapped(x, "attention", self.full if self.mixed else x.item)

    def view(self, x: Value, count: int) -> Value:
        """A part of x."""
        view = self.t.same(x)
        view.count = count
        size = x.size
        return self.t.record(view, [x], [], lambda g, kept: [self.t.work(size)])

    def contiguous(self, x: Value, *, always: bool = False) -> Value:
        """A copy with heads first, which one example does not need."""
        if self.b == 1 and not always:
            return x
        out = self.t.value(x.count, x.item, "attention")
        size = x.size
        return self.t.record(out, [x], [], lambda g, kept: [self.t.work(size)] if not always else [g])

    def product(self, a: Value, b: Value, count: int) -> Value:
        """A batch of matrix products: keeps both factors."""
        out = self.t.value(count, a.item, "attention")
        sizes = a.size, b.size
        return self.t.record(out, [a, b], [a.storage, b.storage], lambda g, kept: [self.t.work(size) for size in sizes])

    def softmax(self, x: Value) -> Value:
        """Keeps its result; float32 under autocast on a GPU."""
        return self.mapped(x, "attention", self.exact(x), keep_result=True)

    def head(self, x: Value) -> Value:
        """Logits and their loss: float32 logits, their log-softmax, and on the way back two gradients of that size."""
        vocab = self.model.vocab
        logits = self.linear(x, (self.model.dim, vocab), "logits", "head's matrix")
        as_made = logits
        if logits.item < 4 and (self.mixed or self.model.family in ("gpt", "gptj")):
            logits = self.mapped(logits, "logits", 4)
        out = self.t.value(logits.count, logits.item, "logits")
        size = out.size
        del as_made  # the model's forward pass refers to them until the loss is there

        def back(g: Storage, kept: list[Storage]) -> Gradients:
            return [self.t.work(size)]

        return self.t.record(out, [logits], [out.storage], back)

"""The operations of a pass on a tape: what each allocates, keeps for the backward pass, and gives back there.

Follows torch's own formulas for its derivatives and the modules of transformers, one function here for one there.
"""

from __future__ import annotations

from collections.abc import Sequence

from tt_cli.memory.architectures import Architecture
from tt_cli.memory.question import CalculatorOptions
from tt_cli.memory.tape import Storage, Tape, Value

CASTS = "16-bit copies of weights"


class Operations:
    """Those of one model under these options, on one tape."""

    def __init__(self, model: Architecture, options: CalculatorOptions) -> None:
        self.model, self.s, self.t = model, options, Tape()
        self.b, self.n = options.micro_batch, options.sequence or model.sequence
        self.cuda = options.kind == "cuda"
        self.mixed = options.precision == "mixed"
        self.full = 2 if options.precision == "pure16" else 4  # bytes of a value of the stream
        self.low = 4 if options.precision == "fp32" else 2  # … of a product
        self.casts: dict[object, Storage] = {}
        self.masks: list[Storage] = []
        self.weights: Value | None = None  # of the last attention: a layer refers to them until it ends

    # -- attention --

    def attend_qkv(self, qkv: Value) -> Value:
        """Attention from one storage of queries, keys and values (b, n, 3 inner)."""
        if self.s.attention == "fused":
            return self.fused([qkv], qkv.count // 3, self.n)
        views = [self.third(qkv) for _ in range(3)]
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

        def back(g: Storage, kept: list[Storage]) -> list[Storage]:
            # the three gradients, then joined where they came from one storage
            given = [self.t.work(sum(sizes) // 3) for _ in range(3)]
            return given if len(sizes) == 3 else [self.t.work(sizes[0])]

        return self.t.record(out, parts, [*(part.storage for part in parts), out.storage, rows.storage], back)

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
        scores = self.mapped(scores, "attention")  # scaled
        if bias is not None:
            scores = self.plus(scores, bias.item, bias)
        if masked:
            scores = self.plus(scores, self.full)
        weights = self.mapped(scores, "attention", self.exact(scores), keep_result=True)  # softmax
        del scores
        if model.family in ("gpt", "gptj"):
            weights = self.halved(weights)
        weights = self.weights = self.dropout(weights, "attention")
        v = self.contiguous(v)
        out = self.product(self.halved(weights), v, self.b * n * model.inner)
        del weights, v
        return self.t.record(self.t.value(out.count, out.item, "attention"), [out], [], [0])  # heads last again

    # -- operations --

    def embed(self, n: int) -> Value:
        """Rows of the vocabulary's matrix, whose gradient is of the whole matrix."""
        return self.table(self.b * n, self.model.vocab)

    def table(self, count: int, rows: int) -> Value:
        """So many rows of a matrix of `rows`."""
        x = self.t.value(count * self.model.dim, self.full, "embeddings")
        size = rows * self.model.dim * self.full

        def back(g: Storage, kept: list[Storage]) -> list[Storage]:
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
        self.t.value(x.count, 4, "norms and residuals")  # squared
        out = self.t.value(x.count, x.item, "norms and residuals")
        size = x.size

        def back(g: Storage, kept: list[Storage]) -> list[Storage]:
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
            if weight not in self.casts:
                self.casts[weight] = Storage(self.t, 2 * numel, CASTS)
            keep.append(self.casts[weight])

        def back(g: Storage, kept: list[Storage]) -> list[Storage]:
            into = self.t.work(count * item)
            own = self.t.work(numel * item)
            if self.mixed:
                self.t.work(numel * 4)
            del own
            return [into]

        return self.t.record(out, [x], keep, back)

    def halved(self, x: Value) -> Value:
        """A copy in the products' type, where x is wider."""
        return x if x.item <= self.low else self.mapped(x, "attention", self.low)

    def widened(self, x: Value) -> Value:
        return x if x.item == 4 else self.mapped(x, "attention", 4)

    def mapped(
        self, x: Value, label: str, item: int = 0, keep: Sequence[Storage] = (), *, keep_result: bool = False
    ) -> Value:
        """One value of `item` bytes (0: as many as before) for each of x; a gradient of x's size on the way back."""
        out = self.t.value(x.count, item or x.item, label)
        return self.t.record(out, [x], [out.storage] if keep_result else keep, [x.size])

    def add(self, a: Value, b: Value) -> Value:
        """A residual: keeps nothing, and both take the same gradient."""
        out = self.t.value(max(a.count, b.count), max(a.item, b.item), "norms and residuals")
        return self.t.record(out, [a, b], [], [value.size if value.item < out.item else 0 for value in (a, b)])

    def plus(self, x: Value, item: int, bias: Value | None = None) -> Value:
        """Add a mask or a bias, whose gradient is the sum over all examples."""
        out = self.t.value(x.count, max(x.item, item), "attention")
        own = x.size if x.item < out.item else 0
        return self.t.record(out, [x, bias] if bias else [x], [], [own, bias.size] if bias else [own])

    def dropout(self, x: Value, label: str) -> Value:
        """Keeps which values stay: a byte each on a GPU, their own type on a CPU."""
        if not self.model.dropout:
            return x
        return self.mapped(x, label, keep=[Storage(self.t, x.count * (1 if self.cuda else x.item), label)])

    def gelu(self, x: Value, label: str = "feed-forward") -> Value:
        """One operation: keeps its input."""
        return self.mapped(x, label, keep=[x.storage])

    def relu(self, x: Value) -> Value:
        """Keeps its result."""
        return self.mapped(x, "feed-forward", keep_result=True)

    def gelu_new(self, x: Value) -> Value:
        """GPT's, of single operations: 0.5 x (1 + tanh(c (x + 0.044715 x^3))). Keeps x, x / 2, tanh and 1 + tanh."""
        width = x.count * self.exact(x)  # of powers
        powers = [Storage(self.t, x.count * 4, "feed-forward")] if width > x.size else []
        half = Storage(self.t, x.size, "feed-forward")
        cube = Storage(self.t, width, "feed-forward")
        inside = Storage(self.t, width, "feed-forward")
        del cube
        tanh = Storage(self.t, width, "feed-forward")
        del inside
        plus = Storage(self.t, width, "feed-forward")
        out = self.t.value(x.count, self.exact(x), "feed-forward")
        size = x.size

        def back(g: Storage, kept: list[Storage]) -> list[Storage]:
            first = self.t.work(size)
            inner = self.t.work(width)
            kept[1:2], kept[-1:] = [], []
            third = self.t.work(width)
            fourth = self.t.work(width)
            del inner, third, fourth
            return [first]

        return self.t.record(out, [x], [x.storage, half, tanh, plus, *powers], back)

    def rotated(self, x: Value) -> Value:
        """GPT-J's rotary embedding of some of each head's values: joined with the others anew."""
        return self.mapped(x, "attention", self.full if self.mixed else x.item)

    def third(self, x: Value) -> Value:
        """A third of x, in its storage."""
        return self.t.record(Value(x.storage, x.count // 3, x.item), [x], [], [x.size])

    def contiguous(self, x: Value) -> Value:
        """A copy with heads first, which one example does not need."""
        return x if self.b == 1 else self.mapped(x, "attention")

    def product(self, a: Value, b: Value, count: int) -> Value:
        """A batch of matrix products: keeps both factors."""
        out = self.t.value(count, a.item, "attention")
        return self.t.record(out, [a, b], [a.storage, b.storage], [a.size, b.size])

    def head(self, x: Value) -> Value:
        """Logits and their loss: float32 logits, their log-softmax, and on the way back two gradients of that size."""
        as_made = logits = self.linear(x, (self.model.dim, self.model.vocab), "logits", "head's matrix")
        if logits.item < 4 and (self.mixed or self.model.family in ("gpt", "gptj")):
            logits = self.mapped(logits, "logits", 4)
        out = self.mapped(logits, "logits", keep_result=True)
        del as_made  # the model's forward pass refers to them until the loss is there
        return out

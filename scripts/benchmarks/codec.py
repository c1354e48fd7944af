"""Measure the gradient codec beside hivemind's 8-bit codecs: time, error, bytes.

- Time: encoding and decoding parts of 512Ki normally distributed elements as hivemind calls a codec (tensor to protobuf
  message and back, memory for both taken anew), on one thread. Each repetition takes the codecs in turn, ours also
  without numba; the smallest time of each counts. `add` is what a reducer does with a part that came: the sum grows by
  the decoded part times a weight. Ours does it in one pass, with hivemind's a part is decoded first.
- sparse: messages of local steps, 64 of each 4,096 elements. What they lose is sent later, so no error is told.
- Error: the norm of what is lost over the norm of what was sent. `normal`; `rows` of 1024 normal elements whose scales
  span four decades; `t3`, Student's t with three degrees of freedom; `emoji`, gradients of the emoji-demo run: the
  model is trained for some steps of 128 examples from the run's first weights (by Adam at 2e-3, so that nothing of
  the swarm is needed), and of several steps all tensors that travel in 8 bits count together.
- The device is the CPU: gradients are averaged in host memory.

JSON keys: codec_vs_uniform and codec_vs_blockwise (their time over ours), codec_error_normal, _rows, _t3 and _emoji;
the same with uniform_ and blockwise_ instead of codec_; *_encode_ns, *_decode_ns and *_add_ns per element, also for
portable_ (ours without numba) and sparse_; *_bytes per element; implementation and why.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)
from hivemind.proto import runtime_pb2

from scripts.benchmarks.harness import in_turns
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.kernel_choice import Implementation
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import load_run
from tt_cli.swarm.compression import linear8
from tt_cli.swarm.compression.codec import GradientCodec, Linear8, SparseMessage
from tt_cli.swarm.compression.linear8 import PortableLinear8

PART = 512 * 1024  # elements: hivemind's parts of 512 KiB in 8 bits
WEIGHT = 3.0
QUICK = "fewer repetitions and training steps"
OURS, SPARSE = GradientCodec(Linear8()), GradientCodec(SparseMessage(64))
CODECS: dict[str, GradientCodec | CompressionBase] = {
    "codec": OURS,
    "portable": OURS,
    "sparse": SPARSE,
    "uniform": Uniform8BitQuantization(),
    "blockwise": BlockwiseQuantization(),
}
DATA = ("normal", "rows", "t3", "emoji")


def drawn(kind: str, seed: int) -> torch.Tensor:
    """One part, fp32, of the size of gradients."""
    random = np.random.default_rng(seed)
    values = random.standard_t(3, PART) if kind == "t3" else random.standard_normal(PART)
    if kind == "rows":
        values = (values.reshape(-1, 1024) * 10.0 ** random.uniform(-4, 0, (PART // 1024, 1))).reshape(-1)
    return torch.from_numpy((values * 1e-3).astype(np.float32))


def emoji_gradients(steps: int, every: int) -> Iterator[list[torch.Tensor]]:
    """Of every so many steps of the emoji-demo run: the gradients that travel in 8 bits."""
    run = load_run("emoji-demo")
    model = Dalle(DalleConfig.from_run(run))
    model.initialise(run.run.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = ExampleStream(run, load_tokenizer(run), seed=0).batches(run.swarm.target_batch_size)
    for step in range(steps):
        batch = next(batches)
        optimizer.zero_grad()
        model.loss(**batch.tensors).total.backward()
        if step % every == 0:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            yield [each.detach().clone() for each in gradients if each.numel() >= run.swarm.large_tensor]
        optimizer.step()


def encode(codec: GradientCodec | CompressionBase, part: torch.Tensor) -> runtime_pb2.Tensor:
    """The message that carries a part."""
    if isinstance(codec, GradientCodec):
        return codec.message(codec.of(True).encode(part), part.numel(), True)
    return codec.compress(part, CompressionInfo.from_tensor(part, key=0))


def decode(codec: GradientCodec | CompressionBase, message: runtime_pb2.Tensor) -> torch.Tensor:
    """The part that a message carries."""
    if not isinstance(codec, GradientCodec):
        return deserialize_torch_tensor(message)
    tensor = torch.empty(message.size[0])
    codec.of(True).decode_into(codec.read_part(message, tensor.numel(), True), tensor)
    return tensor


def lost(codec: GradientCodec | CompressionBase, tensors: list[torch.Tensor]) -> float:
    """Relative error over all tensors, cut into parts as in a round."""
    error = total = 0.0
    for tensor in tensors:
        for part in tensor.reshape(-1).split(PART):
            again = decode(codec, encode(codec, part))
            error += float((again.double() - part.double()).square().sum())
            total += float(part.double().square().sum())
    return float((error / total) ** 0.5)


@contextmanager
def arithmetic(name: str) -> Iterator[None]:
    """Within it linear8 is portable where `name` says so."""
    chosen = linear8.implementation
    if name == "portable":
        portable = Implementation(PortableLinear8(), "portable", "asked for")
        linear8.implementation = lambda: portable  # type: ignore[assignment]
    try:
        yield
    finally:
        linear8.implementation = chosen


def add(codec: GradientCodec | CompressionBase, message: runtime_pb2.Tensor, total: torch.Tensor) -> None:
    """What a reducer does with a part."""
    if isinstance(codec, GradientCodec):
        codec.of(True).add_decoded(message.buffer, total, WEIGHT)
    else:
        total.add_(deserialize_torch_tensor(message), alpha=WEIGHT)


def timed(work: Callable[[], object]) -> float:
    """Nanoseconds per element of a part."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) / PART * 1e9


def times(repetitions: int) -> dict[str, tuple[float, float, float]]:
    """Smallest nanoseconds per element to encode, to decode and to add, by codec."""
    part = drawn("normal", 0)
    total = torch.zeros(PART)

    def of(name: str, codec: GradientCodec | CompressionBase) -> tuple[float, float, float]:
        with arithmetic(name):
            message = encode(codec, part)
            work = partial(encode, codec, part), partial(decode, codec, message), partial(add, codec, message, total)
            return tuple(map(timed, work))  # type: ignore[return-value]

    rows = in_turns({name: partial(of, name, codec) for name, codec in CODECS.items()}, repetitions)
    return {name: tuple(map(min, zip(*each, strict=True))) for name, each in rows.items()}  # type: ignore[misc]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures by key."""
    warnings.filterwarnings("ignore")  # hivemind's codecs call what numpy and torch will drop one day
    linear8.implementation()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    best = times(15 if args.quick else 100)
    for other in ("uniform", "blockwise"):
        figures[f"codec_vs_{other}"] = sum(best[other][:2]) / sum(best["codec"][:2])
    steps, every = (5, 2) if args.quick else (41, 10)
    data = {kind: [drawn(kind, seed) for seed in range(1 if args.quick else 4)] for kind in DATA if kind != "emoji"}
    data["emoji"] = [tensor for step in emoji_gradients(steps, every) for tensor in step]
    for name, codec in CODECS.items():
        for key, value in zip(("encode", "decode", "add"), best[name], strict=True):
            figures[f"{name}_{key}_ns"] = value
        if name == "portable":  # the same bytes
            continue
        for kind in DATA if codec is not SPARSE else ():
            figures[f"{name}_error_{kind}"] = lost(codec, data[kind])
        figures[f"{name}_bytes"] = len(encode(codec, data["normal"][0]).buffer) / PART
    chosen = linear8.implementation()
    return {**figures, "implementation": f"{chosen.name}: {chosen.reason}"}

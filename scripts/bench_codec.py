#!/usr/bin/env python
"""Measure the gradient codec beside hivemind's 8-bit codecs: time, error, bytes.

- Time: encoding and decoding parts of 512Ki normally distributed elements as hivemind calls a codec (tensor to protobuf
  message and back), on one thread. Each repetition takes the codecs in turn; the smallest time of each counts.
- Error: the norm of what is lost over the norm of what was sent. `normal`; `rows` of 1024 normal elements whose scales
  span four decades; `t3`, Student's t with three degrees of freedom; `emoji`, gradients of the emoji-demo run: the
  model is trained for some steps of 128 examples from the run's first weights (by Adam at 2e-3, so that nothing of
  the swarm is needed), and of several steps all tensors that travel in 8 bits count together.
- The device is the CPU: gradients are averaged in host memory.

    scripts/bench_codec.py
    scripts/bench_codec.py --quick --json

JSON keys: codec_vs_uniform and codec_vs_blockwise (their time over ours), codec_error_normal, _rows, _t3 and _emoji;
the same with uniform_ and blockwise_ instead of codec_; *_encode_ns and *_decode_ns per element; *_bytes per element.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # hivemind's codecs call what numpy and torch will drop one day

import numpy as np  # noqa: E402
import torch  # noqa: E402
from hivemind.compression import (  # noqa: E402
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)

from tt_cli.data import ExampleStream, load_tokenizer  # noqa: E402
from tt_cli.model import Dalle, DalleConfig  # noqa: E402
from tt_cli.run import load_run  # noqa: E402
from tt_cli.swarm.registry import Linear8, register  # noqa: E402

PART = 512 * 1024  # elements: hivemind's parts of 512 KiB in 8 bits
CODECS: dict[str, CompressionBase] = {
    "codec": Linear8(),
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
        model.loss(batch.text, batch.image).total.backward()
        if step % every == 0:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            yield [each.detach().clone() for each in gradients if each.numel() >= run.swarm.large_tensor]
        optimizer.step()


def lost(codec: CompressionBase, tensors: list[torch.Tensor]) -> float:
    """Relative error over all tensors, cut into parts as in a round."""
    error = total = 0.0
    for tensor in tensors:
        for part in tensor.reshape(-1).split(PART):
            again = deserialize_torch_tensor(codec.compress(part, CompressionInfo.from_tensor(part, key=0)))
            error += float((again.double() - part.double()).square().sum())
            total += float(part.double().square().sum())
    return float((error / total) ** 0.5)


def times(repetitions: int) -> dict[str, tuple[float, float]]:
    """Smallest nanoseconds per element to encode and to decode, by codec."""
    part = drawn("normal", 0)
    info = CompressionInfo.from_tensor(part, key=0)
    best = {name: (float("inf"), float("inf")) for name in CODECS}
    for repetition in range(repetitions + 1):
        for name, codec in CODECS.items():
            started = time.perf_counter()
            message = codec.compress(part, info)
            encoded = time.perf_counter()
            deserialize_torch_tensor(message)
            decoded = time.perf_counter()
            if repetition:  # the first one warms up
                encode, decode = best[name]
                best[name] = (
                    min(encode, (encoded - started) / PART * 1e9),
                    min(decode, (decoded - encoded) / PART * 1e9),
                )
    return best


def measure(quick: bool) -> dict[str, float]:
    """All figures by key."""
    register()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    best = times(15 if quick else 100)
    for other in ("uniform", "blockwise"):
        figures[f"codec_vs_{other}"] = sum(best[other]) / sum(best["codec"])
    steps, every = (5, 2) if quick else (41, 10)
    data = {kind: [drawn(kind, seed) for seed in range(1 if quick else 4)] for kind in DATA if kind != "emoji"}
    data["emoji"] = [tensor for step in emoji_gradients(steps, every) for tensor in step]
    for name, codec in CODECS.items():
        for kind in DATA:
            figures[f"{name}_error_{kind}"] = lost(codec, data[kind])
        figures[f"{name}_encode_ns"], figures[f"{name}_decode_ns"] = best[name]
        part = data["normal"][0]
        message = codec.compress(part, CompressionInfo.from_tensor(part, key=0))
        figures[f"{name}_bytes"] = len(message.buffer) / PART
    return figures


def shown(figures: dict[str, float]) -> str:
    lines = [f"{'':11}{'encode':>9}{'decode':>9}{'bytes':>9}" + "".join(f"{kind:>9}" for kind in DATA)]
    for name in CODECS:
        numbers = [f"{figures[f'{name}_{key}']:9.3f}" for key in ("encode_ns", "decode_ns", "bytes")]
        errors = [f"{figures[f'{name}_error_{kind}']:9.2%}" for kind in DATA]
        lines.append(f"{'linear8' if name == 'codec' else name:11}" + "".join(numbers + errors))
    lines.append("ns and bytes per element; relative errors")
    for other in ("uniform", "blockwise"):
        lines.append(f"encode + decode: {figures[f'codec_vs_{other}']:.1f} times as fast as {other}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and training steps")
    args = parser.parse_args()
    figures = measure(args.quick)
    if args.json:
        where = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, Python {platform.python_version()}"
        print(json.dumps({**figures, "machine": f"{where}, torch {torch.__version__}"}))
    else:
        print(shown(figures))


if __name__ == "__main__":
    main()

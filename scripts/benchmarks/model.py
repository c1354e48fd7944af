"""Measure a training step (forward and backward) of the paper's model beside dalle-pytorch 1.6.6.

- Each variant runs in a process of its own, one after the other, with the same batch and threads. A first step warms
  up and is not counted; of the others the fastest counts.
- Memory is the peak during a counted step: resident memory of the process on a CPU, torch's allocator on a GPU.
- On a CPU the baseline computes in float32. On a GPU the best of float32, float16 and bfloat16 counts.
- `activation budget` is what our reversible trunk may keep for the backward pass; the rest is computed again. On a CPU
  it is set so that the peak stays below four fifths of the baseline's.
- The rate is model FLOPs (8.85e12 for an example at full depth, whatever is computed again) over time, beside a large
  product of matrices in the same dtype; on a GPU their quotient in bfloat16 is `mfu`.

Needs torch and numpy; the baseline comes from the package index or from a folder (--baseline).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.baselines import dalle_pytorch
from scripts.benchmarks.harness import printed_by
from scripts.benchmarks.process_figures import PeakMemory, seconds_on
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig

FULL_DEPTH = 64
QUICK = "4 layers"
FLOPS = 8.85e12  # of one example's forward and backward pass at full depth
GIB = 1 << 30
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU_BUDGET = {"fp32": 0.8, "bf16": 0.7}  # GiB
CARDS = (8, 16, 24)  # GB of a home GPU


def config(depth: int) -> DalleConfig:
    """The paper's model (configs/dalle.toml), perhaps with fewer layers."""
    return DalleConfig(
        dim=1024, depth=depth, heads=16, dim_head=64, text_vocab=32100, text_length=256, image_size=32, image_vocab=8192
    )


# -- one variant, in its own process ---


def measure_variant(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak bytes of the variant that the arguments name."""
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.variant == "baseline":
        dalle_pytorch.load(args.baseline)
        model: Any = dalle_pytorch.build(args.depth).to(device)
    else:
        if device.type == "cpu":
            keep_freed_memory()
        model = Dalle(config(args.depth)).to(device)
        model.activation_budget = int(args.budget * GIB)

    def step(size: int) -> None:
        text = torch.randint(1, 32100, (size, 256), device=device)
        image = torch.randint(0, 8192, (size, 1024), device=device)
        for parameter in model.parameters():
            parameter.grad = None
        dtype = DTYPES[args.dtype]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(text, image, return_loss=True) if args.variant == "baseline" else model.loss(text, image).total
        loss.backward()

    if args.card:
        return {"largest": _largest(step, device, args.card * 10**9)}
    step(args.batch)
    seconds, peak = [], 0
    for _ in range(args.steps):
        with PeakMemory(device) as memory:
            seconds.append(seconds_on(device, lambda: step(args.batch)))
        peak = max(peak, memory.peak)
    return {"seconds": min(seconds), "peak": peak}


def _largest(step: Callable[[int], None], device: torch.device, memory: int) -> int:
    """The largest micro-batch on a card of so many bytes, 0 if none."""
    torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(device).total_memory, device)

    def fits(size: int) -> bool:
        try:
            step(size)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        return True

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- all variants ---


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product of matrices."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    repeats = 10 if device.type == "cuda" else 1
    fastest = min(seconds_on(device, lambda: [a @ b for _ in range(repeats)]) for _ in range(5))
    return 2 * size**3 * repeats / fastest


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the figures."""
    device, found = torch.device(args.device), dict[str, dict[str, Any]]()

    def run(variant: str, dtype: str, budget: float = 0.0, card: int = 0) -> dict[str, Any]:
        """One process; its figures, also kept under the variant's name if they are the fastest so far."""
        name = f"{variant} {dtype}"
        given = [
            *("--variant", variant, "--dtype", dtype, "--device", args.device, "--budget", budget, "--card", card),
            *("--depth", args.depth, "--batch", args.batch, "--threads", args.threads, "--steps", args.steps),
            *(("--baseline", args.baseline) if args.baseline else ()),
        ]
        print(f"… {name}{f', {card} GB' if card else ''}", file=sys.stderr)
        result = {**printed_by(__spec__.name, *given), "budget": budget}
        if not card and result["seconds"] < found.get(name, {"seconds": float("inf")})["seconds"]:
            found[name] = result
        return result

    cpu = device.type == "cpu"
    rates = {name: matrix_rate(device, DTYPES[name] or torch.float32) for name in ("fp32", "bf16")}
    if cpu:
        theirs, budgets = ["fp32"], dict(CPU_BUDGET)
    else:
        theirs = list(DTYPES)
        budgets = dict.fromkeys(("fp32", "bf16"), 0.5 * torch.cuda.mem_get_info(device)[0] / GIB)
    for _ in range(args.rounds):
        for dtype in theirs:
            run("baseline", dtype)
        for dtype, budget in budgets.items():
            run("ours", dtype, budget if args.budget is None else args.budget)
    best = min(theirs, key=lambda dtype: found[f"baseline {dtype}"]["seconds"])
    base, fp32, bf16 = found[f"baseline {best}"], found["ours fp32"], found["ours bf16"]
    flops = FLOPS * args.depth / FULL_DEPTH * args.batch
    result = {
        "threads": args.threads,
        "depth": args.depth,
        "batch": args.batch,
        "baseline_dtype": best,
        "train_fp32_ratio": round(found["baseline fp32"]["seconds"] / fp32["seconds"], 2),
        "train_bf16_ratio": round(base["seconds"] / bf16["seconds"], 2),
        "train_memory_ratio": round((fp32 if cpu else bf16)["peak"] / base["peak"], 2),
        "train_memory_bf16_ratio": round(bf16["peak"] / base["peak"], 2),
        "mfu": None if cpu else round(flops / bf16["seconds"] / rates["bf16"], 3),
        "matrix_gflops": {name: round(rate / 1e9) for name, rate in rates.items()},
        "steps": {
            name: {
                "seconds": round(entry["seconds"], 3),
                "peak_gib": round(entry["peak"] / GIB, 2),
                "budget_gib": round(entry["budget"], 2),
                "gflops": round(flops / entry["seconds"] / 1e9),
            }
            for name, entry in found.items()
        },
    }
    if not cpu:
        result["largest_micro_batch"] = {
            f"{card} GB": {
                "baseline": run("baseline", best, card=card)["largest"],
                "ours": run("ours", "bf16", card=card)["largest"],
            }
            for card in CARDS
        }
    return result


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="folder with dalle-pytorch's unpacked wheels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, help="examples at a time (default: 1 on a CPU, 8 on a GPU)")
    parser.add_argument("--depth", type=int, help=f"layers (default {FULL_DEPTH})")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each variant")
    parser.add_argument("--steps", type=int, help="counted steps in each process")
    parser.add_argument("--budget", type=float, metavar="GIB", help="activation budget of ours")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All variants."""
    cpu = args.device == "cpu"
    args.depth = args.depth or (4 if args.quick else FULL_DEPTH)
    args.batch = args.batch or (1 if cpu else 8)
    args.steps = args.steps or (2 if cpu else 5)
    dalle_pytorch.load(args.baseline)  # fetched once, before the processes need it
    return compare(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    arguments(parser)
    parser.add_argument("--variant", choices=("baseline", "ours"))
    parser.add_argument("--dtype", choices=tuple(DTYPES))
    parser.add_argument("--card", type=int)
    print(json.dumps(measure_variant(parser.parse_args())))

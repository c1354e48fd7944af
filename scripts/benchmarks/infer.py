"""Measure drawing at the paper's size beside dalle-pytorch 1.6.6: tokens per second, memory, VQGAN pictures per second.

- Both decoders run in this process, in turns, with the same threads and the same dtype: float32 on a CPU; on a GPU
  tt_cli's own choice, and the baseline in whichever of float32 and bfloat16 is faster for it.
- A token is one cached step of every picture and the choice of its next code, timed at positions spread evenly over
  the picture (a whole one takes the baseline a quarter of an hour). The baseline's caches up to there are made up, and
  the median of the steps at one position counts. tokens/s = pictures / mean over the positions.
- 128 candidates are drawn whole on a GPU; on a CPU the time follows from the steps under the memory bound.
- Memory is what the process (a GPU's allocator) takes at most while it draws under the bound, beyond the model.

Needs torch, numpy and safetensors; the baseline comes from the package index or from a folder (--baseline).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.baselines import dalle_pytorch, vqgan
from scripts.benchmarks.process_figures import PeakMemory, seconds_on
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.projection import drawing_dtype
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.model.sampling.drawing_memory import drawing_bytes
from tt_cli.model.sampling.generation import StepDecoder, draw_codes

PAPER = DalleConfig(
    dim=1024, depth=64, heads=16, dim_head=64, text_vocab=32100, text_length=256, image_size=32, image_vocab=8192
)
CANDIDATES = 128
BOUND = 4 << 30
QUICK = "fewer positions and steps; no memory, no candidates"
SAMPLING = Sampling(top_k=256, top_p=0.75)


class Ours:
    """tt_cli's steps, with the authors' filters."""

    def __init__(self, model: Dalle, b: int, dtype: torch.dtype) -> None:
        self.decoder = StepDecoder(model, 1, b, dtype)
        device = model.logits.weight.device
        self.code = torch.zeros(b, dtype=torch.int64, device=device)
        self.noise = torch.rand(b, PAPER.image_positions, device=device, dtype=torch.float64)

    def at(self, position: int) -> None:
        """Go to raster position `position`."""
        self.position = position

    def step(self) -> None:
        """Feed one code, choose the next."""
        logits = self.decoder.step(self.code, self.position)
        self.position += 1
        self.code = SAMPLING.choose(logits, self.noise[:, self.position])


def seconds_per_step(steps: Any, position: int, count: int, device: torch.device) -> float:
    """Median time of `count` steps from `position` on; on a GPU, which is fed ahead, their mean."""
    steps.at(position)
    if device.type == "cuda":
        for _ in range(3):
            steps.step()
        return seconds_on(device, lambda: [steps.step() for _ in range(count)]) / count
    return statistics.median(seconds_on(device, steps.step) for _ in range(count))


def free() -> None:
    """Give back what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def positions(count: int) -> list[int]:
    """`count` raster positions, evenly spread."""
    return [round((place + 0.5) / count * PAPER.image_positions) - 8 for place in range(count)]


def compare(
    model: Dalle, theirs: dict[str, dalle_pytorch.CachedSteps], b: int, dtype: torch.dtype, quick: bool
) -> dict[str, Any]:
    """Tokens per second of both at batch b, in turns; `quick` looks at one early position only, where both are fast."""
    device = model.logits.weight.device
    mine = Ours(model, b, dtype)
    spread = positions(4)[:1] if quick else positions(4 if b == 1 else 2)
    few, many = (2 if b == 1 else 1), (4 if quick else 8)
    if device.type == "cuda":
        few, many = 10, 50
    spent: dict[str, list[float]] = {name: [] for name in ("ours", *theirs)}
    for position in spread:
        for name, steps in theirs.items():
            steps.b = b
            spent[name].append(seconds_per_step(steps, position, few, device))
            steps.cache = {}
            free()
        spent["ours"].append(seconds_per_step(mine, position, many, device))
    rates = {name: b / statistics.mean(times) for name, times in spent.items()}
    best = max(theirs, key=lambda name: rates[name])
    return {
        f"generate_b{b}_ratio": round(rates["ours"] / rates[best], 2),
        f"generate_b{b}_tokens_per_s": round(rates["ours"], 2),
        f"generate_b{b}_baseline_tokens_per_s": round(rates[best], 3),
        f"generate_b{b}_baseline_dtype": best,
        f"generate_b{b}_positions": spread,
        f"generate_b{b}_step": mine.decoder.mode,
    }


def our_rate(model: Dalle, b: int, dtype: torch.dtype, device: torch.device) -> float:
    """Tokens per second of tt_cli alone."""
    steps = Ours(model, b, dtype)
    return b / statistics.mean(seconds_per_step(steps, position, 5, device) for position in positions(4))


def candidates(model: Dalle, text: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """128 candidates of one prompt: bytes each, the peak and the time under BOUND, and on a GPU the time without it."""
    device = text.device
    each = drawing_bytes(model, 1, 3, dtype) - drawing_bytes(model, 1, 2, dtype)
    most = max(rows for rows in range(1, CANDIDATES + 1) if drawing_bytes(model, 1, rows, dtype) <= BOUND)
    batches = -(-CANDIDATES // most)
    rows = -(-CANDIDATES // batches)
    free()
    with PeakMemory(device) as memory:
        prefill, seconds = under_bound(model, text, rows, dtype)
    free()
    found = {
        "candidate_bytes": each,
        "candidates_memory_bound": BOUND,
        "candidates_batch_under_bound": rows,
        "candidates_predicted_bytes": drawing_bytes(model, 1, rows, dtype),
        "candidates_peak_bytes": memory.peak - memory.before,
        "candidates_bounded_seconds_extrapolated": round(
            batches * (prefill + PAPER.image_positions * seconds), 2 if device.type == "cuda" else 0
        ),
    }
    if device.type == "cuda":
        noise = torch.rand(CANDIDATES, PAPER.image_positions, device=device, dtype=torch.float64)
        with PeakMemory(device) as memory:
            started = time.perf_counter()
            decoder = StepDecoder(model, 1, CANDIDATES, dtype)
            built = time.perf_counter() - started
            whole = seconds_on(device, lambda: draw_codes(decoder, text, noise, SAMPLING))
        found |= {
            "candidates_seconds": round(built + whole, 2),
            "candidates_build_seconds": round(built, 2),
            "candidates_one_batch_peak_bytes": memory.peak - memory.before,
        }
        del decoder
        free()
    return found


def under_bound(model: Dalle, text: Tensor, rows: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the text's pass and of a step for `rows` candidates."""
    steps = Ours(model, rows, dtype)
    prefill = seconds_on(text.device, lambda: steps.decoder.prefill(text))
    return prefill, statistics.mean(seconds_per_step(steps, position, 3, text.device) for position in positions(3))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one flat mapping."""
    torch.set_num_threads(args.threads)
    chosen = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(chosen)
    dalle_pytorch.load(args.baseline)
    dtype, reason = drawing_dtype(device)
    name = str(dtype).removeprefix("torch.")
    found: dict[str, Any] = {"threads": args.threads, "dtype": name, "dtype_reason": reason}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        text = torch.randint(1, PAPER.text_vocab, (1, PAPER.text_length)).to(device)
    model = Dalle(PAPER).to(device).eval().requires_grad_(False)
    plain = dalle_pytorch.build(optimize_for_inference=True).to(device).eval()
    theirs = sum(parameter.numel() for parameter in plain.parameters() if parameter.requires_grad)
    ours = sum(parameter.numel() for parameter in model.parameters())
    if theirs != ours:
        sys.exit(f"infer: the baseline has {theirs} parameters, the model {ours}; they are not the same model")
    baselines = {"float32": dalle_pytorch.CachedSteps(plain, text)}
    if device.type == "cuda":
        plain = dalle_pytorch.build(optimize_for_inference=True).to(device, torch.bfloat16).eval()
        baselines["bfloat16"] = dalle_pytorch.CachedSteps(plain, text)
    for b in (1, 16):
        found |= compare(model, baselines, b, dtype, args.quick)
        free()
    del plain, baselines
    free()
    if not args.quick:
        if device.type == "cpu":
            for b in (1, 16):
                found[f"generate_b{b}_bfloat16_tokens_per_s"] = round(our_rate(model, b, torch.bfloat16, device), 2)
        found |= candidates(model, text, dtype)
    del model
    free()
    return found | vqgan.compare(torch.get_num_threads(), args.quick, device.type)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="default: all cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR", help="folder with dalle-pytorch 1.6.6 and what it needs, unpacked"
    )

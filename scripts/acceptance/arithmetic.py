"""Parts of the acceptance that one process shows: products, gradients, memory, speed, drawing, learning.

Each takes a device and returns figures; on a CPU the same code runs at small sizes, and what only a GPU has is None.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks import convergence, infer, peer
from scripts.benchmarks.gpu_counts import ACCOUNTS, step_bytes
from scripts.benchmarks.model import DTYPES, config, matrix_rate
from scripts.benchmarks.process_figures import PeakMemory, seconds_on
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers import axial_attention
from tt_cli.model.layers.fused import fusion
from tt_cli.model.sampling.generation import StepDecoder, draw_codes
from tt_cli.peer.device import Device
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig, load_run
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition

GIB = 1 << 30
LEARNING_STEPS = 200


def model_of(device: torch.device, depth: int) -> DalleConfig:
    """The paper's model with so many layers on a GPU; on a CPU, where the code alone is tried out, emoji-demo's."""
    return config(depth) if device.type == "cuda" else DalleConfig.from_run(load_run("emoji-demo"))


def machine(device: torch.device) -> dict[str, Any]:
    """What is there; products of matrices in each precision beside the same in fp64."""
    versions = {}
    for name in ("torch", "triton", "bitsandbytes", "hivemind", "nvidia-cudnn-cu13"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    found: dict[str, Any] = {"versions": versions, "compiler": shutil.which(os.environ.get("CC", "cc"))}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "architectures": torch.cuda.get_arch_list(),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "gib": round(properties.total_memory / GIB, 1),
            "free_gib": round(torch.cuda.mem_get_info(device)[0] / GIB, 1),
        }
    torch.manual_seed(0)
    a, b = torch.randn(256, 512, dtype=torch.float64), torch.randn(512, 256, dtype=torch.float64)
    exact = a @ b
    for name, dtype in DTYPES.items():
        x, y = (each.to(device, dtype or torch.float32) for each in (a, b))
        product = (x @ y).to("cpu", torch.float64)
        found[f"{name}_error"] = _distance(product, exact)
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    """The norm of a difference over the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def training_step(model: Dalle, text: Tensor, image: Tensor, precision: str) -> Tensor:
    """The loss of one training step; its gradients are left in the model."""
    model.zero_grad(set_to_none=True)
    dtype = DTYPES[precision]
    with torch.autocast(text.device.type, dtype, enabled=dtype is not None):
        loss = model.loss(text, image).total
    loss.backward()
    return loss.detach()


def batch_of(cfg: DalleConfig, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random examples, alike on every device."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, cfg.text_vocab, (size, cfg.text_length), generator=generator)
    image = torch.randint(0, cfg.image_vocab, (size, cfg.image_positions), generator=generator)
    return text.to(device), image.to(device)


def _gradients(model: Dalle) -> Tensor:
    return torch.cat([p.grad.detach().float().cpu().flatten() for p in model.parameters() if p.grad is not None])


def numbers(device: torch.device) -> dict[str, Any]:
    """One step of the paper's first layers, reversible and not, on the device and on the CPU in fp32."""
    size = 2
    worst: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), value)

    for reversible in (True, False):
        cfg = replace(model_of(device, 5), reversible=reversible)
        reference = Dalle(cfg)
        text, image = batch_of(cfg, size, torch.device("cpu"))
        loss = training_step(reference, text, image, "fp32")
        gradients = _gradients(reference)
        model = Dalle(cfg)
        model.load_state_dict(reference.state_dict())
        model.to(device)
        text, image = text.to(device), image.to(device)
        for precision in DTYPES if reversible else ("fp32", "bf16"):  # fp16 needs a reversible model
            by_way = []
            for ways in ({device.type} - {"cpu"}, set[str]()):
                fusion.devices = ways
                there = training_step(model, text, image, precision)
                by_way.append(_gradients(model))
                note(f"{precision}_loss_error", abs(float(there) / float(loss) - 1))
                note(f"{precision}_gradient_error", _distance(by_way[-1], gradients))
            if precision == "fp32":
                note("compiled_error", _distance(*by_way))
    return {**worst, "compile_failures": int(bool(fusion.failure)), "compile_failure": fusion.failure}


def probe(device: torch.device) -> dict[str, Any]:
    """The micro-batch search of emoji-demo beside a sweep."""
    gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if gpu else 3 * GIB
    args = argparse.Namespace(device=str(device), threads=1, memory=memory, quick=not gpu)
    return peer.measure_probe(load_run("emoji" if gpu else "emoji-demo"), args)


def _account(run: RunConfig, size: int, precision: str, budget: float, device: torch.device) -> dict[str, Any]:
    """The account of a step's memory beside what the allocator had at most."""
    model = Dalle(DalleConfig.from_run(run)).to(device)
    model.activation_budget = int(budget)
    text, image = batch_of(model.config, size, device)
    training_step(model, text, image, precision)
    with PeakMemory(device) as memory:
        training_step(model, text, image, precision)
    del model, text, image
    gc.collect()
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # workspaces of CUDA's libraries
    said, measured = step_bytes(run, size, precision, budget), memory.peak - held
    return {"run": run.run.name, "micro_batch": size, "precision": precision, "said": said, "measured": measured}


def memory(device: torch.device) -> dict[str, Any]:
    """The cases of `scripts/bench gpu_counts`, on the device."""
    if device.type != "cuda":
        return {"accounts": [_account(load_run("emoji-demo"), 4, "fp32", 0, device)], "account_error": None}
    rows = []
    for name, changes, size, precision, budget in ACCOUNTS:
        rows.append(_account(load_run(name).replaced(changes), size, precision, budget, device))
        torch.cuda.empty_cache()
    return {"accounts": rows, "account_error": max(abs(row["said"] / row["measured"] - 1) for row in rows)}


def _model_that_keeps(cfg: DalleConfig, device: torch.device) -> Dalle:
    """A model that keeps activations in 40 % of a card."""
    model = Dalle(cfg).to(device)
    if device.type == "cuda":
        model.activation_budget = int(0.4 * torch.cuda.get_device_properties(device).total_memory)
    return model


def speed(device: torch.device) -> dict[str, Any]:
    """Examples a second of the paper's step by micro-batch: compiled, eager, and with attention's scores in memory."""
    gpu = device.type == "cuda"
    sizes, times = ((1, 2, 4, 8, 16, 32), 3) if gpu else ((1, 2), 1)
    cfg = model_of(device, 64)
    model = _model_that_keeps(cfg, device)
    precision = "bf16" if gpu else "fp32"
    rate = matrix_rate(device, DTYPES[precision] or torch.float32)
    rows: list[dict[str, Any]] = []
    for way, compiled, by_lines in (("compiled", True, True), ("eager", False, True), ("scores", True, False)):
        fusion.devices = {"cuda"} if compiled and gpu else set()
        (axial_attention.DEVICES.add if by_lines else axial_attention.DEVICES.discard)("cuda")
        for size in sizes:
            work = partial(training_step, model, *batch_of(cfg, size, device), precision)
            try:
                work()  # compiles
                seconds = min(seconds_on(device, work) for _ in range(times))
            except torch.OutOfMemoryError:
                break
            mfu = cfg.flops_per_sample() * size / seconds / rate
            rows.append({"way": way, "micro_batch": size, "per_s": round(size / seconds, 2), "mfu": round(mfu, 3)})
    by = {(row["way"], row["micro_batch"]): row for row in rows}
    axial_attention.DEVICES.add("cuda")

    def over(other: str) -> float | None:
        """How many times as fast the usual way is, over all micro-batches that fit."""
        fit = [size for size in sizes if ("compiled", size) in by and (other, size) in by]
        ratios = [by["compiled", size]["per_s"] / by[other, size]["per_s"] for size in fit]
        return round(statistics.geometric_mean(ratios), 3) if gpu else None

    return {
        "steps": rows,
        "matrix_tflops": round(rate / 1e12, 2),
        "mfu_16": by["compiled", 16]["mfu"] if ("compiled", 16) in by else None,
        "compiled_over_eager": over("eager"),
        "lines_over_scores": over("scores"),
    }


def profile(device: torch.device) -> dict[str, Any]:
    """Kernels of the paper's step at micro-batch 8, longest first, and the share of its time in which one runs."""
    gpu = device.type == "cuda"
    cfg = model_of(device, 64)
    fusion.devices = {device.type} - {"cpu"}
    model = _model_that_keeps(cfg, device)
    text, image = batch_of(cfg, 8 if gpu else 1, device)
    precision = "bf16" if gpu else "fp32"
    training_step(model, text, image, precision)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if gpu else [])]) as profiler:
        seconds = seconds_on(device, lambda: training_step(model, text, image, precision))
    average = profiler.key_averages()
    spent = {event.key: event.self_device_time_total if gpu else event.self_cpu_time_total for event in average}
    counts = {event.key: event.count for event in average}
    longest = sorted(spent, key=lambda name: -spent[name])[:15]
    rows = [{"kernel": name[:80], "calls": counts[name], "ms": round(spent[name] / 1e3, 2)} for name in longest]
    busy = sum(spent.values()) / 1e6 / seconds if gpu else None
    return {"seconds_of_step": round(seconds, 4), "busy": busy and round(min(busy, 1.0), 3), "kernels": rows}


def drawing(device: torch.device) -> dict[str, Any]:
    """Tokens a second of one picture, as a graph and op by op; 128 candidates of one prompt within 4 GiB."""
    gpu = device.type == "cuda"
    cfg = model_of(device, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    model = Dalle(cfg).to(device).eval().requires_grad_(False)
    found: dict[str, Any] = {}
    text, _ = batch_of(cfg, 1, device)
    noise = torch.rand(1, cfg.image_positions, device=device, dtype=torch.float64)
    decoder = StepDecoder(model, 1, 1, dtype)
    draw_codes(decoder, text, noise, infer.SAMPLING)
    seconds = seconds_on(device, lambda: draw_codes(decoder, text, noise, infer.SAMPLING))
    found |= {"way": decoder.mode, "tokens_per_s": round(cfg.image_positions / seconds, 1) if gpu else None}
    code = torch.zeros(1, dtype=torch.int64, device=device)
    steps = 20
    by_graph = seconds_on(device, lambda: [decoder.step(code, place) for place in range(steps)])
    by_op = seconds_on(device, lambda: [decoder._step() for _ in range(steps)])
    found["graph_over_eager"] = round(by_op / by_graph, 2) if gpu else None
    if gpu:
        candidates = infer.candidates(model, text, dtype)
        found |= {"candidates_gib": round(candidates["candidates_peak_bytes"] / GIB, 2), **candidates}
    return found


def averaging_round(device: torch.device) -> dict[str, Any]:
    """Seconds to hold the gradients of emoji's model for a round and to copy parameters back, beside a micro-batch."""
    run = load_run("emoji" if device.type == "cuda" else "emoji-demo")
    model = Dalle(DalleConfig.from_run(run))
    model.initialise(run.run.seed)
    shared = TrainedState(run, model, None)
    model.to(device)
    text, image = batch_of(model.config, 64 if device.type == "cuda" else 4, device)
    precision = "bf16" if device.type == "cuda" else "fp32"
    training_step(model, text, image, precision)
    sums, codec = Accumulator(list(shared.shapes())), codec_of(run)
    buffer = GradientBuffer(Partition(shared.shapes(), run.swarm.large_tensor, codec.block), codec)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def hold() -> None:
        sums.add(gradients, len(text), torch.ones((), device=device), {})
        sums.hold(buffer)

    def best(work: Any) -> float:
        return min(seconds_on(device, work) for _ in range(3))

    micro_batch = best(lambda: training_step(model, text, image, precision))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    held, copied = best(hold), best(lambda: shared.copy_into(model))
    gpu = device.type == "cuda"
    return {
        "micro_batch_s": micro_batch,
        "hold_s": held,
        "copy_back_s": copied,
        "hold_over_micro_batch": held / micro_batch if gpu else None,
        "copy_back_over_micro_batch": copied / micro_batch if gpu else None,
    }


def learning(device: torch.device) -> dict[str, Any]:
    """Losses of emoji-demo, first and last five steps, by precision; examples and first weights are the same."""
    gpu, found, last = device.type == "cuda", dict[str, Any](), dict[str, float]()
    for precision in DTYPES if gpu else ("fp32",):
        where = Device(device, str(device), DTYPES[precision])
        training = convergence.Training(convergence.run_of(64, 0), *convergence.ARMS["swarm"], [64], [0], where)
        losses = [loss for loss, _ in islice(training.steps(), LEARNING_STEPS if gpu else 3)]
        first, last[precision] = (statistics.fmean(part) for part in (losses[:5], losses[-5:]))
        found[precision] = {"first": first, "last": last[precision], "steps": len(losses)}
        if precision == "fp32":
            found["fp32_fall"] = 1 - last["fp32"] / first if gpu else None
        else:
            found[f"{precision}_over_fp32"] = last[precision] / last["fp32"]
    return found

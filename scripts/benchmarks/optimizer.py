"""Measure an optimizer step at 125M parameters on one thread, beside the paper's 8-bit LAMB.

- The baseline is the paper's update (arXiv:2207.03481) with bitsandbytes' kernels as they are today: for one tensor
  after the other, 2^24 elements at a time, both moments are decoded, the update is computed with torch, and they are
  encoded again (baselines/hivemind_optimizer.py).
- The shapes are the 423 tensors of the paper's model. Gradients are normal, each tensor with a scale of its own, the
  same for all; in every round each implementation starts from the same parameters. A first round warms up and is not
  counted.
- They take turns in one process. Times are CPU seconds; ratios are medians over the rounds.
- The floor is the time to move what two passes over the tensors must move, 28 bytes per parameter, at the speed of
  adding two large tensors: first parameter, gradient and codes in, update and codes out; then parameter and update in,
  parameter out. The clipping factor is taken as known.
- Extra memory is the growth of resident memory from before the optimizer is made to the peak of its first step, less
  the moments and the copied tensors themselves.
- The error is |update - baseline's| / |baseline's|, all tensors as one vector. `optimizer_error` is that of real
  gradients: the emoji-demo run is trained (by LAMB with fp32 moments, at its own learning rates), and at each step all
  optimizers make their update of the same parameters by the same gradient, that of a whole target batch; the worst of
  the last five steps counts; keys that end in `_median` have the median of the five. `accuracy` has it beside those
  of ours and of the baseline against fp32 moments, and the same for synthetic gradients of one tensor, eight steps: of
  one scale (`one_scale`), and of rows whose scales differ by about e (`rows`). `synthetic_error` is that of the timed
  rounds, the worst.
- Of the real gradients it also has `zero_second_moments`, the share of all elements with 8-bit moments whose second
  moment reads as 0 while the first does not, and `error_there`, their share of the squared difference between our
  update and that by fp32 moments: the next update of such an element is divided by its newest gradient and eps alone.

Needs bitsandbytes and numba, and 4 GiB of memory (--quick: 1 GiB).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from scripts.benchmarks.baselines.hivemind_optimizer import PaperLamb, grouped
from scripts.benchmarks.harness import cpu_time
from scripts.benchmarks.process_figures import forget_peak, status_bytes
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.optim.kernels import LambKernels, PortableLamb, implementation, warm_up
from tt_cli.optim.lamb import Lamb8bit
from tt_cli.optim.schedule import learning_rate
from tt_cli.run import load_run
from tt_cli.run.sections import OptimizerPart

MIB = 1 << 20
QUICK = "a sixth of the parameters"
RATE = 2.5e-3
FLOOR_BYTES = 28  # per parameter
ALL_FP32 = 2**62  # elements from which moments have 8 bits: none
LAST = 5  # steps whose updates are compared
Given = tuple[dict[str, Tensor], dict[str, Tensor], float]  # parameters, their gradients, the learning rate


class Baseline:
    """The paper's update of parameters by name."""

    def __init__(self, parameters: dict[str, Tensor], settings: OptimizerPart) -> None:
        self.parameters = parameters
        self.lamb = PaperLamb(grouped(parameters, settings), settings, RATE)

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        for name, p in self.parameters.items():
            p.grad = gradients[name]
        for group in self.lamb.param_groups:
            group["lr"] = rate
        self.lamb.step()


def paper_shapes(quick: bool) -> dict[str, torch.Size]:
    """Name to shape; quick: every fourth large tensor, without the largest."""
    with torch.device("meta"):
        model = Dalle(DalleConfig.from_run(load_run("dalle")))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if not quick:
        return shapes
    large = [name for name, shape in shapes.items() if 2**16 <= shape.numel() < 2**25]
    return {name: shape for name, shape in shapes.items() if name in large[::4] or shape.numel() < 2**16}


def empty(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def copy(source: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])


def draw(into: dict[str, Tensor], seed: int, scale: float) -> None:
    """Normal numbers; the tensors differ in scale by a factor of about e."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in into.values():
        factor = float(torch.randn((), generator=generator).exp())
        tensor.normal_(0, scale * factor, generator=generator)


def synthetic(rows: bool, steps: int = 8) -> Iterator[Given]:
    """One tensor of 1Mi elements that stays as it is; normal gradients."""
    generator = torch.Generator().manual_seed(0)
    start = torch.zeros(1024, 1024).normal_(0, 0.02, generator=generator)
    scales = torch.randn(1024, 1, generator=generator).exp() if rows else torch.ones(1)
    for _ in range(steps):
        yield {"weight": start}, {"weight": torch.randn(1024, 1024, generator=generator) * scales * 1e-3}, RATE


def emoji(steps: int, batch: int) -> Iterator[Given]:
    """The emoji-demo run from its first weights on, in batches of so many examples."""
    run = load_run("emoji-demo")
    model = Dalle(DalleConfig.from_run(run))
    model.initialise(run.run.seed)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    optimizer = Lamb8bit(parameters, run.optimizer.model_copy(update={"min_8bit_size": ALL_FP32}))
    examples = ExampleStream(run, load_tokenizer(run), seed=0).batches(batch)
    for step in range(steps):
        now = next(examples)
        model.zero_grad()
        model.loss(**now.tensors).total.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        rate = learning_rate(run.schedule, step)
        yield parameters, gradients, rate
        optimizer.step(gradients, rate)


def accuracy(sequence: Iterable[Given], settings: OptimizerPart, last: int) -> dict[str, float]:
    """Relative differences of the last updates of a sequence: the worst of each, and as `…_median` the median."""
    found: list[dict[str, float]] = []
    start: dict[str, Tensor] = {}
    for parameters, gradients, rate in sequence:
        if not start:
            start, base, own, plain = ({name: p.clone() for name, p in parameters.items()} for _ in range(4))
            fp32 = settings.model_copy(update={"min_8bit_size": ALL_FP32})
            ours = Lamb8bit(own, settings)
            optimizers = ((Baseline(base, settings), base), (ours, own), (Lamb8bit(plain, fp32), plain))
        copy(parameters, start)
        zeros = zero_second_moments(ours)
        for optimizer, updated in optimizers:
            copy(start, updated)
            optimizer.step({name: gradient.clone() for name, gradient in gradients.items()}, rate)
        found.append(
            {
                "from_baseline": relative_error(start, base, own),
                "from_fp32": relative_error(start, plain, own),
                "baseline_from_fp32": relative_error(start, plain, base),
                "zero_second_moments": share(zeros, {name: torch.ones_like(zero) for name, zero in zeros.items()}),
                "error_there": share(zeros, {name: (own[name] - plain[name]).view(-1) ** 2 for name in own}),
            }
        )
    last_of = {key: [each[key] for each in found[-last:]] for key in found[0]}
    medians = {f"{key}_median": round(statistics.median(values), 5) for key, values in last_of.items()}
    return {key: round(max(values), 5) for key, values in last_of.items()} | medians


def zero_second_moments(ours: Lamb8bit) -> dict[str, Tensor]:
    """By tensor with 8-bit moments: where the second reads as 0 and the first does not."""
    found, state = {}, ours.state_dict()
    for key, codes in state.items():
        kind, name = key.split("/", 1)
        if kind == "v.codes":
            found[name] = (codes == 0) & (state[f"m.codes/{name}"] != 127)
    return found


def share(places: dict[str, Tensor], amounts: dict[str, Tensor]) -> float:
    """What part of all amounts is at these places."""
    total = sum(float(amount.sum(dtype=torch.float64)) for amount in amounts.values())
    there = sum(float(amounts[name][place].sum(dtype=torch.float64)) for name, place in places.items())
    return there / total if total else 0.0


def relative_error(before: dict[str, Tensor], theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> float:
    """The difference of two updates of the same parameters over the first update; both as one long vector."""
    difference = update = 0.0
    for name in before:
        parts = zip(*(x[name].view(-1).split(2**20) for x in (before, theirs, ours)), strict=True)
        for p, a, b in parts:
            difference += float((a - b).norm().double() ** 2)
            update += float((a - p).norm().double() ** 2)
    return math.sqrt(difference / update)


def seconds_per_byte() -> float:
    """CPU seconds for a byte read or written by adding two tensors that fit no cache; the fastest of ten."""
    a, b, c = (torch.ones(2**24) for _ in range(3))
    return min(cpu_time(lambda: torch.add(a, b, out=c)) for _ in range(10)) / (12 * 2**24)


def compare(quick: bool, rounds: int) -> dict[str, Any]:
    """Run all implementations in turns; returns the figures."""
    torch.set_num_threads(1)
    before_numba = status_bytes("VmRSS")
    chosen = implementation()
    numba_bytes = status_bytes("VmRSS") - before_numba
    if chosen.name != "compiled":
        sys.exit(f"optimizer: there is no compiled implementation to measure: {chosen.reason}")
    warm_up()
    settings, shapes = load_run("dalle").optimizer, paper_shapes(quick)
    count = sum(shape.numel() for shape in shapes.values())
    start, base, own, drawn, gradients = (empty(shapes) for _ in range(5))
    draw(start, 0, 0.02)
    makers: dict[str, Callable[[], Baseline | Lamb8bit]] = {
        "baseline": lambda: Baseline(base, settings),
        "portable": lambda: Lamb8bit(own, settings, PortableLamb()),
        "compiled": lambda: Lamb8bit(own, settings, fresh(chosen.kernels)),
    }
    optimizers: dict[str, Baseline | Lamb8bit] = {}
    times: dict[str, list[float]] = {name: [] for name in makers}
    extra: dict[str, int] = {}
    errors = []
    equal = True
    for turn in range(rounds + 1):
        draw(drawn, turn + 1, 1e-3)
        finished: dict[str, Tensor] = {}
        for name, make in makers.items():
            copy(start, base if name == "baseline" else own)
            copy(drawn, gradients)
            if name not in optimizers:
                ctypes.CDLL(None).malloc_trim(0)  # or memory that others have freed would be used again, unseen
                forget_peak()
                resting = status_bytes("VmRSS")
                optimizers[name] = make()
            elapsed = cpu_time(lambda name=name: optimizers[name].step(gradients, RATE))
            if turn == 0:
                extra[name] = status_bytes("VmHWM") - resting - moment_bytes(optimizers[name])
                continue
            times[name].append(elapsed)
            if name == "portable":
                errors.append(relative_error(start, base, own))
                finished = {key: checksum(tensor) for key, tensor in own.items()}
            elif name == "compiled":
                equal &= all(bool(torch.equal(finished[key], checksum(tensor))) for key, tensor in own.items())
        copy(base, start)
    equal &= same_state(optimizers["portable"], optimizers["compiled"])
    accuracies = {
        "emoji": accuracy(emoji(*((12, 64) if quick else (30, 128))), load_run("emoji-demo").optimizer, LAST),
        "one_scale": accuracy(synthetic(rows=False), settings, 1),
        "rows": accuracy(synthetic(rows=True), settings, 1),
    }
    floor = FLOOR_BYTES * count * seconds_per_byte()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["baseline"], times[name], strict=True))
        for name in ("compiled", "portable")
    }
    return {
        "parameters": count,
        "tensors": len(shapes),
        "optimizer_compiled_ratio": round(ratios["compiled"], 2),
        "optimizer_portable_ratio": round(ratios["portable"], 2),
        "optimizer_peak_extra_mib": round(max(extra["compiled"], extra["portable"]) / MIB, 1),
        "optimizer_error": accuracies["emoji"]["from_baseline"],
        "optimizer_error_median": accuracies["emoji"]["from_baseline_median"],
        "synthetic_error": round(max(errors), 5),
        "implementations_equal": equal,
        "accuracy": accuracies,
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "nanoseconds_per_parameter": {name: round(value / count * 1e9, 2) for name, value in medians.items()},
        "peak_extra_mib": {name: round(value / MIB, 1) for name, value in extra.items()},
        "floor_seconds": round(floor, 3),
        "compiled_over_floor": round(medians["compiled"] / floor, 2),
        "numba_mib": round(numba_bytes / MIB),
    }


def fresh(kernels: LambKernels) -> LambKernels:
    """Kernels of the same kind with scratch memory of their own, so that it is counted."""
    return type(kernels)()


def moment_bytes(optimizer: Baseline | Lamb8bit) -> int:
    if isinstance(optimizer, Lamb8bit):
        return sum(tensor.nbytes for tensor in optimizer.state_dict().values())
    return sum(tensor.nbytes for state in optimizer.lamb.state.values() for tensor in state.values())


def checksum(tensor: Tensor) -> Tensor:
    """Of all bits: sums of the numbers' bits, plain and weighted by place, which wrap around."""
    bits = tensor.view(-1).view(torch.int32)
    total = weighted = torch.zeros((), dtype=torch.int64)
    for part in bits.split(2**20):
        total = total + part.sum(dtype=torch.int64)
        weighted = weighted * 31 + (part.long() * torch.arange(1, len(part) + 1)).sum()
    return torch.stack([total, weighted])


def same_state(ours: Baseline | Lamb8bit, theirs: Baseline | Lamb8bit) -> bool:
    assert isinstance(ours, Lamb8bit) and isinstance(theirs, Lamb8bit)
    states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(numpy.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()) for a, b in states)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    return compare(args.quick, rounds=3 if args.quick else 5)

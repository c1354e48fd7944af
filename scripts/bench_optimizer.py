#!/usr/bin/env python
"""Measure an optimizer step at 125M parameters on one thread, beside the paper's 8-bit LAMB.

- The baseline is the paper's update (arXiv:2207.03481) with bitsandbytes' kernels as they are today: for one tensor
  after the other, both moments are decoded as a whole, the update is computed with torch, and they are encoded again.
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

    scripts/bench_optimizer.py
    scripts/bench_optimizer.py --quick --json

Needs bitsandbytes and numba, and 4 GiB of memory (--quick: 1 GiB).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tt_cli.data.stream.example_stream import ExampleStream  # noqa: E402
from tt_cli.data.tokenizer import load_tokenizer  # noqa: E402
from tt_cli.model import Dalle, DalleConfig  # noqa: E402
from tt_cli.optim import Lamb8bit, implementation, learning_rate, warm_up  # noqa: E402
from tt_cli.optim.kernels import LambKernels, PortableLamb  # noqa: E402
from tt_cli.run import load_run  # noqa: E402
from tt_cli.run.sections import OptimizerPart  # noqa: E402

MIB = 1 << 20
RATE = 2.5e-3
FLOOR_BYTES = 28  # per parameter
ALL_FP32 = 2**62  # elements from which moments have 8 bits: none
LAST = 5  # steps whose updates are compared
ACCURACIES = {
    "emoji": "real gradients, emoji-demo run",
    "one_scale": "one tensor, one scale",
    "rows": "one tensor, rows of unlike scale",
}
ERRORS = ("from_baseline", "from_fp32", "baseline_from_fp32")
Given = tuple[dict[str, Tensor], dict[str, Tensor], float]  # parameters, their gradients, the learning rate


class PaperLamb:
    """The paper's update over whole tensors; its moments are dictionaries of tensors by name."""

    def __init__(self, parameters: dict[str, Tensor], settings: OptimizerPart) -> None:
        from bitsandbytes import functional

        self.functional, self.parameters, self.settings = functional, parameters, settings
        self.maps = {"m": functional.create_dynamic_map(signed=True), "v": functional.create_dynamic_map(signed=False)}
        self.codes: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
        self.absmax: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
        self.plain: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
        for letter in "mv":
            for name, p in parameters.items():
                if p.numel() < settings.min_8bit_size:
                    self.plain[letter][name] = torch.zeros_like(p)
                else:
                    blocks = -(-p.numel() // settings.block_size)
                    self.absmax[letter][name] = torch.zeros(blocks)
                    zero = int((self.maps[letter] == 0).nonzero()[0])
                    self.codes[letter][name] = torch.full(p.shape, zero, dtype=torch.uint8)

    def _read(self, letter: str, name: str) -> Tensor:
        if name in self.plain[letter]:
            return self.plain[letter][name]
        return self.functional.dequantize_blockwise(
            self.codes[letter][name],
            absmax=self.absmax[letter][name],
            code=self.maps[letter],
            blocksize=self.settings.block_size,
        )

    def _write(self, letter: str, name: str, moment: Tensor) -> None:
        if name not in self.plain[letter]:
            self.functional.quantize_blockwise(
                moment,
                code=self.maps[letter],
                absmax=self.absmax[letter][name],
                out=self.codes[letter][name],
                blocksize=self.settings.block_size,
            )

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        s = self.settings
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        factor = min(1.0, s.max_grad_norm / (float(norm) + 1e-6))
        for name, p in self.parameters.items():
            g = gradients[name].mul_(factor)
            m, v = self._read("m", name), self._read("v", name)
            m.mul_(s.beta1).add_(g, alpha=1 - s.beta1)
            v.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
            self._write("m", name, m)
            self._write("v", name, v)
            update = m / v.sqrt().add_(s.eps)
            if not name.endswith("bias"):
                update.add_(p, alpha=s.weight_decay)
            p_norm, u_norm = p.norm().clamp(0, s.trust_clamp), update.norm()
            trust = float(p_norm / u_norm) if p_norm > 0 and u_norm > 0 else 1.0
            p.add_(update, alpha=-rate * trust)


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
        model.loss(now.text, now.image).total.backward()
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
            optimizers = ((PaperLamb(base, settings), base), (ours, own), (Lamb8bit(plain, fp32), plain))
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


def resident(peak: bool) -> int:
    """Resident bytes of this process, now or at most since the last `reset_peak`."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


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
    return min(timed(lambda: torch.add(a, b, out=c)) for _ in range(10)) / (12 * 2**24)


def timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
    width = torch.backends.cpu.get_cpu_capability()
    return f"{name}, 1 thread, {width}; Python {platform.python_version()}, torch {torch.__version__}"


def compare(quick: bool, rounds: int) -> dict[str, Any]:
    """Run all implementations in turns; returns the figures."""
    torch.set_num_threads(1)
    before_numba = resident(peak=False)
    chosen = implementation()
    numba_bytes = resident(peak=False) - before_numba
    if chosen.name != "compiled":
        sys.exit(f"bench_optimizer: there is no compiled implementation to measure: {chosen.reason}")
    warm_up()
    settings, shapes = load_run("dalle").optimizer, paper_shapes(quick)
    count = sum(shape.numel() for shape in shapes.values())
    start, base, own, drawn, gradients = (empty(shapes) for _ in range(5))
    draw(start, 0, 0.02)
    makers: dict[str, Callable[[], PaperLamb | Lamb8bit]] = {
        "baseline": lambda: PaperLamb(base, settings),
        "portable": lambda: Lamb8bit(own, settings, PortableLamb()),
        "compiled": lambda: Lamb8bit(own, settings, fresh(chosen.kernels)),
    }
    optimizers: dict[str, PaperLamb | Lamb8bit] = {}
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
                reset_peak()
                resting = resident(peak=False)
                optimizers[name] = make()
            elapsed = timed(lambda name=name: optimizers[name].step(gradients, RATE))
            if turn == 0:
                extra[name] = resident(peak=True) - resting - moment_bytes(optimizers[name])
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
        "machine": machine(),
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


def moment_bytes(optimizer: PaperLamb | Lamb8bit) -> int:
    if isinstance(optimizer, Lamb8bit):
        return sum(tensor.nbytes for tensor in optimizer.state_dict().values())
    kinds = (optimizer.codes, optimizer.absmax, optimizer.plain)
    return sum(tensor.nbytes for kind in kinds for tensors in kind.values() for tensor in tensors.values())


def checksum(tensor: Tensor) -> Tensor:
    """Of all bits: sums of the numbers' bits, plain and weighted by place, which wrap around."""
    bits = tensor.view(-1).view(torch.int32)
    total = weighted = torch.zeros((), dtype=torch.int64)
    for part in bits.split(2**20):
        total = total + part.sum(dtype=torch.int64)
        weighted = weighted * 31 + (part.long() * torch.arange(1, len(part) + 1)).sum()
    return torch.stack([total, weighted])


def same_state(ours: PaperLamb | Lamb8bit, theirs: PaperLamb | Lamb8bit) -> bool:
    assert isinstance(ours, Lamb8bit) and isinstance(theirs, Lamb8bit)
    states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(numpy.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()) for a, b in states)


def table(result: dict[str, Any]) -> str:
    names = ("baseline", "portable", "compiled")
    real = result["accuracy"]["emoji"]
    rows = [
        result["machine"],
        f"{result['parameters']:,} parameters in {result['tensors']} tensors",
        "",
        f"{'':24}" + "".join(f"{name:>12}" for name in names),
        f"{'seconds':24}" + "".join(f"{result['seconds'][name]:12.3f}" for name in names),
        f"{'ns per parameter':24}" + "".join(f"{result['nanoseconds_per_parameter'][name]:12.2f}" for name in names),
        f"{'times as fast':24}{1:12.2f}" + "".join(f"{result[f'optimizer_{name}_ratio']:12.2f}" for name in names[1:]),
        f"{'extra memory, MiB':24}" + "".join(f"{result['peak_extra_mib'][name]:12.1f}" for name in names),
        "",
        f"{'errors of an update':34}{'ours-base':>10}{'ours-fp32':>10}{'base-fp32':>10}",
        *(
            f"{ACCURACIES[name]:34}{x['from_baseline']:10.2%}{x['from_fp32']:10.2%}{x['baseline_from_fp32']:10.2%}"
            for name, x in result["accuracy"].items()
        ),
        f"{'emoji, the median of the last five':34}" + "".join(f"{real[f'{key}_median']:10.2%}" for key in ERRORS),
        f"{'as timed, one scale for a tensor':34}{result['synthetic_error']:10.2%}",
        f"emoji: {real['zero_second_moments']:.2%} of second moments read as 0 where the first does not; "
        f"they are {real['error_there']:.0%} of ours-fp32, squared",
        "",
        f"portable and compiled are equal to the last bit: {'yes' if result['implementations_equal'] else 'NO'}",
        f"two passes at the speed of memory: {result['floor_seconds']:.3f} s; "
        f"compiled takes {result['compiled_over_floor']:.1f} times that",
        f"importing numba and its kernels: {result['numba_mib']} MiB, once per process",
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="an optimizer step beside the paper's 8-bit LAMB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a sixth of the parameters: under a minute")
    args = parser.parse_args()
    result = compare(args.quick, rounds=3 if args.quick else 5)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()

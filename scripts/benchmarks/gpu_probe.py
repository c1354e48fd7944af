"""The micro-batch search on a GPU whose kernels are compiled at their first calls, on a clock that is made up.

No GPU is needed: a stub takes as long as the GPUs below by operator counts, and its first calls take as long as Triton
and Inductor do. All sizes from 2 on share one graph, size 1 has its own, and each new size has its libraries choose
kernels. What is real is the search.

- probe_ratio_compiling: samples per second at the chosen size over those at the best, the worst of all cases
- cases: each GPU with each compiler: the size chosen, the ratio, and seconds until it was chosen
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tt_cli.peer.micro_batch import LARGEST_PROBE, MicroBatchSearch, SizeChoice

QUICK = "the same"
TARGET = 4096


@dataclass(frozen=True)
class StubGpu:
    """Seconds of a micro-batch: of launches, which take as long at any size, and of each example."""

    launches: float
    example: float

    def seconds(self, size: int) -> float:
        """A few examples do not fill it."""
        return max(self.launches, 0.3 * self.launches + self.example * size * (1.0 if size >= 4 else 1.15))


@dataclass(frozen=True)
class StubCompiler:
    """Seconds of the first call, of the first one with several examples, and of the first one of each other size."""

    first: float
    several: float
    size: float = 0.0


GPUS = {
    "rtx-4090": StubGpu(0.05, 0.16),
    "h100": StubGpu(0.13, 0.04),
    "small-model": StubGpu(0.02, 0.0004),
}
COMPILERS = {
    "none": StubCompiler(0.0, 0.0),
    "cached": StubCompiler(3.0, 2.0),
    "triton": StubCompiler(12.0, 8.0, 0.5),
    "cold": StubCompiler(60.0, 40.0, 1.0),
}


class StubMemory:
    """Memory that is never short."""

    limit = 1 << 50

    def predicted(self, size: int) -> int:
        """Bytes."""
        return size

    def measured(self) -> int:
        """Bytes."""
        return 1

    def release(self) -> None:
        """Nothing is kept."""


def searched(gpu: StubGpu, compiler: StubCompiler) -> tuple[SizeChoice, float]:
    """The choice, and the seconds that it took by the clock on the wall."""
    now, seen = 0.0, set[int]()

    def compute(size: int) -> None:
        nonlocal now
        now += gpu.seconds(size)
        if not seen:
            now += compiler.first
        elif size > 1 and not seen - {1}:
            now += compiler.several
        elif size not in seen:
            now += compiler.size
        seen.add(size)

    memory: Any = StubMemory()
    choice = MicroBatchSearch(compute, memory, TARGET, patient=True, wall=lambda: now).run()
    return choice, now


def ratio(gpu: StubGpu, compiler: StubCompiler) -> float:
    """Samples per second at the chosen size over those at the best of all."""
    rate: Callable[[int], float] = lambda size: size / gpu.seconds(size)  # noqa: E731
    return rate(searched(gpu, compiler)[0].size) / max(map(rate, range(1, LARGEST_PROBE + 1)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, and the worst."""
    cases = {}
    for name, gpu in GPUS.items():
        for compiler, costs in COMPILERS.items():
            choice, seconds = searched(gpu, costs)
            cases[f"{name}, {compiler}"] = {
                "size": choice.size,
                "ratio": round(ratio(gpu, costs), 4),
                "seconds": round(seconds, 1),
            }
    return {"probe_ratio_compiling": min(case["ratio"] for case in cases.values()), "cases": cases}

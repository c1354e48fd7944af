"""Sizes of model to choose from, and what each takes: the memory model's answer before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

from tt_cli.memory import GIB, shown
from tt_cli.memory.gpus import USABLE
from tt_cli.run import RunConfig, load_run
from tt_cli.task import task_of

DIM_HEAD = 64


@dataclass(frozen=True)
class Size:
    """One size with the schedule that it starts from. Only those of the built-in runs were trained to their ends."""

    dim: int
    layers: int
    batch: int
    steps: int
    peak_lr: float


SIZES = {
    "tiny": Size(128, 4, 128, 110, 2e-2),  # tt demo
    "small": Size(192, 6, 256, 1600, 2e-2),  # the built-in run
    "medium": Size(512, 16, 1024, 5000, 5e-3),
    "large": Size(1024, 24, 2048, 15000, 2.5e-3),
    "paper": Size(1024, 64, 4096, 31250, 2.5e-3),  # Training Transformers Together
}
# Sold as so many GB; what a volunteer may have, smallest first.
GPUS = (
    (4, "a GPU with 4 GB"),
    (6, "a GTX 1660 (6 GB)"),
    (8, "an RTX 3060 Ti (8 GB)"),
    (12, "an RTX 3060 (12 GB)"),
    (16, "a T4 of Colab or Kaggle (16 GB)"),
    (24, "an RTX 3090 or 4090 (24 GB)"),
    (48, "an A6000 (48 GB)"),
    (80, "an A100 or H100 (80 GB)"),
)


@dataclass(frozen=True)
class Takes:
    """The memory that a peer of a run takes, with one example at a time. Bytes; gpu_ram: of the host beside the GPU."""

    parameters: int
    effective: int  # counted as often as layers use them
    cpu_ram: int
    gpu: int
    gpu_ram: int

    @property
    def fits(self) -> str:
        """The smallest GPU that is enough."""
        return next((words for gb, words in GPUS if self.gpu <= USABLE * gb * GIB), "no single GPU")

    def in_words(self) -> str:
        """One line."""
        shared = f" ({_millions(self.effective)} with shared layers counted each)"
        counted = f"{_millions(self.parameters)} parameters{shared if self.effective != self.parameters else ''}"
        return f"{counted}; {shown(self.gpu)} of GPU memory: {self.fits}; or {shown(self.cpu_ram)} of RAM on a CPU"

    def in_brief(self) -> str:
        """A row in a table of sizes on a narrow terminal."""
        memory = f"{shown(self.gpu):>8} of a GPU or {shown(self.cpu_ram):>8} of RAM"
        return f"{_millions(self.parameters):>7} parameters, {memory}"


def sized(size: Size, codes: str) -> RunConfig:
    """The built-in run that learns such codes, with a model of this size and the schedule it starts from."""
    changes = {
        "model.dim": size.dim,
        "model.depth": size.layers,
        "model.heads": size.dim // DIM_HEAD,
        "model.dim_head": DIM_HEAD,
        "schedule.total_steps": size.steps,
        "schedule.peak_lr": size.peak_lr,
        "swarm.target_batch_size": size.batch,
    }
    return load_run("dalle" if codes == "f8" else "emoji").replaced(changes)


def takes(run: RunConfig) -> Takes:
    """The account of a trainer of this run. Raises UsageError for a model that cannot be built."""
    task = task_of(run)
    cpu, gpu = task.need("cpu"), task.need("cuda", itemsize=2)
    return Takes(**task.sizes(), cpu_ram=cpu.host, gpu=gpu.device, gpu_ram=gpu.host)


def nearest(dim: int, layers: int) -> Size:
    """The named size whose schedule suits a model of these measures."""
    return min(SIZES.values(), key=lambda size: (abs(size.dim - dim), abs(size.layers - layers)))


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M"

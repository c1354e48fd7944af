"""Which device trains, in which precision, with how many examples at a time; each with its reason."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Choice, Emit

GIB = 2**30
LARGEST_PROBE = 256
SLOWEST_MICRO_BATCH = 4.0  # seconds on the CPU: a peer answers Ctrl-C and new parameters between micro-batches
WORTHWHILE = 1.05
SMALL_BATCH = 32  # examples; activations of this many may be stored when they are small
STORED_VALUES = 50  # kept for one channel of one position of one layer, counted in PyTorch's autograd graph
STORED_LIMIT = 2 * GIB
MEMORY_SHARE = 0.8  # of what is free: desktops and other programs want some


@dataclass(frozen=True)
class Device:
    """A torch device, how it is called, and the autocast type (None: fp32 throughout)."""

    torch_device: torch.device
    name: str
    autocast: torch.dtype | None

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context in which losses are computed."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=self.autocast)


def choose_device(wanted: str | None, emit: Emit) -> Device:
    """The device the user named, else the first GPU, else the CPU. Raises UsageError for one that is not there."""
    if wanted:
        device, reason = _named(wanted), f"--device {wanted}"
    elif torch.cuda.is_available():
        device, reason = torch.device("cuda", 0), f"the first of {torch.cuda.device_count()} GPUs"
    else:
        device, reason = torch.device("cpu"), "no GPU that torch can use"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = torch.bfloat16 if bf16 else None
        precision = ("bf16", f"{name} computes in bf16") if bf16 else ("fp32", f"{name} has no bf16")
    else:
        name, autocast = f"CPU, {torch.get_num_threads()} threads", None
        precision = ("fp32", "fastest and exact on a CPU for small models")
    emit(Choice("device", str(device), f"{name}: {reason}"))
    emit(Choice("precision", *precision))
    return Device(device, name, autocast)


def _named(wanted: str) -> torch.device:
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"--device {wanted}: no such device: give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {wanted}: give cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(f"--device {wanted}: torch sees {count} GPUs here: give --device cpu or check the driver")
        return torch.device("cuda", device.index or 0)
    return device


def choose_backward(run: RunConfig, emit: Emit) -> str:
    """How the reversible trunk gets its activations back: "store" is faster, "recompute" smaller."""
    model = run.model
    length = model.text_length + 1 + run.vqgan.grid**2
    per_example = STORED_VALUES * model.depth * length * model.dim * 4
    store = SMALL_BATCH * per_example <= STORED_LIMIT
    size = f"{SMALL_BATCH} examples' activations take about {SMALL_BATCH * per_example / GIB:.2g} GiB"
    emit(Choice("backward", "store" if store else "recompute", f"{size}, the limit is {STORED_LIMIT / GIB:.0f} GiB"))
    return "store" if store else "recompute"


def free_memory(device: torch.device) -> int:
    """Bytes free on the device (RAM for the CPU, after what programs can give back)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_micro_batch(
    device: Device,
    wanted: int | None,
    target_batch_size: int,
    compute: Callable[[int], None],
    emit: Emit,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Examples per forward and backward: the fastest size of 1, 2, 4 … that fits, tried for real.

    compute: runs one forward and backward with that many examples. The target batch limits it: one micro-batch
    should not overshoot the swarm's step. Raises TTError when not even one example fits.
    """
    if wanted:
        emit(Choice("micro-batch", str(wanted), "--batch-size"))
        return wanted
    free = free_memory(device.torch_device)
    limit = max(1, min(LARGEST_PROBE, target_batch_size // 4))
    best, best_rate, tried = 0, 0.0, []
    stopped = f"the largest tried, for a target batch of {target_batch_size}"
    for size in _doubling(limit):
        try:
            seconds, used = _probe(device, size, compute, clock)
        except torch.OutOfMemoryError:
            stopped = f"{size} does not fit"
            break
        rate = size / seconds
        tried.append(size)
        if rate > best_rate * WORTHWHILE or not best:
            best, best_rate = size, rate
        elif size >= 4 * best:
            stopped = "larger ones are no faster"
            break
        if 2 * seconds > SLOWEST_MICRO_BATCH and device.torch_device.type == "cpu":
            stopped = f"larger ones take over {SLOWEST_MICRO_BATCH:g} s"
            break
        if 2 * used > MEMORY_SHARE * free:
            stopped = f"{size} takes {used / GIB:.1f} of {free / GIB:.1f} GiB free"
            break
    if not best:
        raise TTError(
            f"not one example fits in the {free / GIB:.1f} GiB free on {device.name}: close programs that use it"
        )
    emit(
        Choice(
            "micro-batch",
            str(best),
            f"fastest of {', '.join(map(str, tried))} at {best_rate:.1f} samples/s; {stopped}",
        )
    )
    return best


def _doubling(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2


def _probe(device: Device, size: int, compute: Callable[[int], None], clock: Callable[[], float]) -> tuple[float, int]:
    """Seconds and bytes of one forward and backward; the first, which warms caches up, is not counted when short."""
    cuda = device.torch_device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    before = free_memory(device.torch_device)
    fastest, spent = float("inf"), 0.0
    for _ in range(3):
        started = clock()
        compute(size)
        if cuda:
            torch.cuda.synchronize(device.torch_device)
        seconds = clock() - started
        fastest, spent = min(fastest, seconds), spent + seconds
        if spent > 0.5:
            break
    used = (
        torch.cuda.max_memory_allocated(device.torch_device)
        if cuda
        else max(0, before - free_memory(device.torch_device))
    )
    return fastest, used

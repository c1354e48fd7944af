"""Which device trains, in which precision, with how many examples at a time; each with its reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.model.allocator import free_memory
from tt_cli.run.parts import ModelPart
from tt_cli.supervisor.events import Choice, Emit

GIB = 2**30
LARGEST_PROBE = 256
SLOWEST_MICRO_BATCH = 4.0  # seconds on the CPU: a peer answers Ctrl-C and new parameters between micro-batches
WORTHWHILE = 1.05
MEMORY_SHARE = 0.8  # of what is free: desktops and other programs want some
ACTIVATION_SHARE = {"cpu": 0.25, "cuda": 0.5}  # of what is free; a CPU's RAM also holds the optimizer and the round
SMALL_DIM = 512  # below this width a CPU spends too little in matrix products for their precision to matter
MUCH_FASTER = 1.5


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


def choose_device(wanted: str | None, model: ModelPart, emit: Emit) -> Device:
    """The device the user named, else the first GPU, else the CPU; its precision for this model.

    Raises UsageError for a device that is not there.
    """
    if wanted:
        device, reason = _named(wanted), f"--device {wanted}"
    elif torch.cuda.is_available():
        device, reason = torch.device("cuda", 0), f"the first of {torch.cuda.device_count()} GPUs"
    else:
        device, reason = torch.device("cpu"), "no GPU that torch can use"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        autocast: torch.dtype | None = torch.bfloat16
        precision = ("bf16", f"{name} computes in bf16")
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            autocast, precision = None, ("fp32", f"{name} has no bf16, and fp16 needs a reversible model")
            if model.reversible:  # whose branches scale their gradients to fp16's range
                autocast, precision = torch.float16, ("fp16", f"{name} has no bf16")
    else:
        name = f"CPU, {torch.get_num_threads()} threads"
        autocast, precision = _precision_of_cpu(model.dim)
    emit(Choice("device", str(device), f"{name}: {reason}"))
    emit(Choice("precision", *precision))
    return Device(device, name, autocast)


def _precision_of_cpu(dim: int) -> tuple[torch.dtype | None, tuple[str, str]]:
    """bf16 where this CPU multiplies much faster in it; the name and the reason."""
    if dim < SMALL_DIM:
        return None, ("fp32", f"exact, and as fast on a CPU for a model of width {dim}")
    rates = {dtype: _product_rate(dim, dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = rates[torch.bfloat16] / rates[torch.float32]
    measured = f"this CPU multiplies {ratio:.2g} times as fast in bf16 as in fp32"
    return (torch.bfloat16, ("bf16", measured)) if ratio > MUCH_FASTER else (None, ("fp32", measured))


def _product_rate(dim: int, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a feed-forward product over 512 positions, the best of three."""
    x, weight = torch.ones(512, dim, dtype=dtype), torch.ones(8 * dim, dim, dtype=dtype)
    fastest = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * 512 * dim * 8 * dim / fastest


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


def choose_activation_budget(device: Device, emit: Emit) -> int:
    """Bytes that the reversible trunk may keep for its backward pass; the more, the less it computes again."""
    kind = device.torch_device.type
    free, share = free_memory(device.torch_device), ACTIVATION_SHARE[kind]
    budget = int(share * free)
    reason = f"{share:.0%} of the {free / GIB:.1f} GiB free; activations beyond it are computed again"
    emit(Choice("activations", f"{budget / GIB:.1f} GiB", reason))
    return budget


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

"""Choice of the device that trains and of its precision, each with its reason."""

from __future__ import annotations

import contextlib
import gc
import re
import time
from dataclasses import dataclass

import torch

from tt_cli.errors import UsageError
from tt_cli.memory import Kind
from tt_cli.run.sections import ModelPart
from tt_cli.supervisor.events import Choice, Emit
from tt_cli.supervisor.processes import release_freed_memory

SMALL_DIM = 512  # below this width a CPU spends too little in matrix products for their precision to matter
MUCH_FASTER = 1.5


@dataclass(frozen=True)
class Device:
    """A torch device, how it is called, and the autocast type (None: fp32 throughout)."""

    torch_device: torch.device
    name: str
    autocast: torch.dtype | None

    @property
    def kind(self) -> Kind:
        """As tt_cli.memory names it."""
        return "cpu" if self.torch_device.type == "cpu" else "cuda"

    @property
    def itemsize(self) -> int:
        """Bytes of a value in matrix products."""
        return 4 if self.autocast is None else self.autocast.itemsize

    @property
    def dtype_name(self) -> str:
        """fp32, bf16 or fp16."""
        return {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.autocast]

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context in which losses are computed."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=self.autocast)


def release_memory(device: torch.device) -> None:
    """Give back all that nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()


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
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", wanted)
    if match is None:
        raise UsageError(f"--device {wanted}: no such device: give cpu, cuda or cuda:N")
    if wanted == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise UsageError(f"--device {wanted}: torch sees {count} GPUs here: give --device cpu or check the driver")
    return torch.device("cuda", index)

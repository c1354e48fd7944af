"""Choice of the device that trains and of its precision, each with its reason.

torch names GPUs that it has no kernels for, so one is taken only after a product on it, in the precision chosen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tt_cli.errors import TTError, UsageError, first_line, is_out_of_memory
from tt_cli.memory import Kind
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.peer.join_settings import DEVICE
from tt_cli.supervisor.events import Card, Choice, Emit, Log
from tt_cli.supervisor.household.sensors import nvidia_driver
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.task.task import Task

SMALL_DIM = 512  # below this width a CPU spends too little in matrix products for their precision to matter
MUCH_FASTER = 1.5
OLDER_CUDA = "pip install torch --index-url https://download.pytorch.org/whl/cu126"
LEAST_DRIVER = {12: 525, 13: 580}  # by CUDA's major version


@dataclass(frozen=True)
class Device:
    """A torch device, how it is called, and the autocast type (None: fp32 throughout)."""

    torch_device: torch.device
    name: str
    autocast: torch.dtype | None

    @property
    def kind(self) -> Kind:
        """As tt_cli.memory names it, which knows of one kind of GPU."""
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
    if device.type == "cpu":
        release_freed_memory()
    else:
        torch.get_device_module(device).empty_cache()


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """A product in that type; where kernels are rarely complete, a step of a tiny model. Raises what torch does."""
    x = torch.ones(16, 16, device=device, dtype=dtype)
    if float((x @ x).float().sum()) != 16.0**3:
        raise RuntimeError("a product of matrices came out wrong")
    if device.type in ("mps", "xpu"):
        text, image = (torch.ones(1, length, dtype=torch.long, device=device) for length in (2, 4))
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            Dalle(DalleConfig(16, 1, 1, 16, 4, 2, 2, 4)).to(device).loss(text, image).total.backward()


@dataclass(frozen=True)
class Hardware:
    """This machine's GPUs as torch tells of them, and the driver; tests hand in others."""

    cuda: Any = torch.cuda
    xpu: Any = torch.xpu
    mps: Any = torch.mps
    cuda_version: str | None = torch.version.cuda
    hip_version: str | None = torch.version.hip
    driver: Callable[[], str] = nvidia_driver
    try_out: Callable[[torch.device, torch.dtype], None] = try_out

    def count(self, kind: str) -> int:
        """GPUs of a kind that torch sees."""
        module = getattr(self, kind)
        return module.device_count() if module.is_available() else 0

    def gpus(self) -> Iterator[torch.device]:
        """Those of CUDA or ROCm, in the order in which they are tried."""
        return (torch.device("cuda", index) for index in range(self.count("cuda")))

    def name(self, device: torch.device) -> str:
        """The maker's name."""
        return "Apple GPU" if device.type == "mps" else str(getattr(self, device.type).get_device_name(device))

    def has_bf16(self, device: torch.device) -> bool:
        """Tell whether products in bf16 are that very device's own; torch's question asks the current one."""
        if device.type == "xpu":
            return bool(self.xpu.is_bf16_supported(including_emulation=False))
        return device.type == "cuda" and bool(self.hip_version or self.cuda.get_device_capability(device) >= (8, 0))

    def precision(self, device: torch.device) -> tuple[torch.dtype | None, tuple[str, str]]:
        """The autocast type; its name and the reason."""
        name = self.name(device)
        if self.has_bf16(device):
            return torch.bfloat16, ("bf16", f"{name} computes in bf16")
        if device.type == "cuda":
            return torch.float16, ("fp16", f"{name} has no bf16")
        return None, ("fp32", f"{name} has no bf16, and fp16 is for CUDA")

    def fault(self, device: torch.device, dtype: torch.dtype) -> str:
        """The reason for which nothing trains on a GPU that torch names, and the remedy; "" where it works."""
        try:
            self.try_out(device, dtype)
            return ""
        except (RuntimeError, TypeError, AssertionError) as error:  # torch has no common error for what it lacks
            why = first_line(error)[:200]
        torch_here = f"torch {torch.__version__}"
        if device.type != "cuda":
            return f"{torch_here} lacks something there ({why}): give --device cpu"
        if "no kernel image" not in why and "invalid device function" not in why:
            return f"{why}: look at {'rocm-smi' if self.hip_version else 'nvidia-smi'}, or give --device cpu"
        kernels = ", ".join(self.cuda.get_arch_list())
        if self.hip_version:
            arch = self.cuda.get_device_properties(device).gcnArchName.split(":")[0]
            return f"{torch_here} has no kernels for {arch}, but for {kernels}: install a torch that has"
        capability = self.cuda.get_device_capability(device)
        newest = max((int(arch) for arch in re.findall(r"sm_(\d+)", kernels)), default=0)
        remedy = "pip install -U torch" if 10 * capability[0] + capability[1] > newest else OLDER_CUDA
        capable = f"compute capability {capability[0]}.{capability[1]}"
        return f"{torch_here} has no kernels for its {capable}, but for {kernels}: {remedy}"

    def hidden(self) -> str:
        """The reason for which torch sees no GPU though NVIDIA's driver is here, and the remedies; "" for none."""
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or self.hip_version or not (driver := self.driver()):
            return ""
        if self.cuda_version is None:
            return f"there is NVIDIA's driver {driver}, and torch is built for CPUs alone: install one for CUDA"
        least = LEAST_DRIVER.get(int(self.cuda_version.split(".")[0]), 580)
        needs = f"torch {torch.__version__} (CUDA {self.cuda_version}) sees no GPU through NVIDIA's driver {driver}"
        return f"{needs}: update the driver to {least} or newer, or install torch for an older CUDA: {OLDER_CUDA}"


def choose_device(wanted: str | None, task: Task[Any], emit: Emit, hardware: Hardware = Hardware()) -> Device:
    """The device the user named, else the first GPU that works, else the CPU; its precision for this task's model.

    Raises UsageError for a device that is not there, or that does not work; TTError where GPUs are full just now.
    """
    named = named_device(wanted, hardware) if wanted else None
    skipped = full = ""
    for device in hardware.gpus() if named is None else [named] if named.type != "cpu" else []:
        (autocast, precision), name = hardware.precision(device), hardware.name(device)
        if not (fault := hardware.fault(device, autocast or torch.float32)):
            if device.type == "cuda" and not hardware.hip_version:
                emit(Card(f"GPU-{hardware.cuda.get_device_properties(device).uuid}"))
            reason = f"--device {wanted}" if named else f"the first of {hardware.count('cuda')} GPUs{skipped}"
            return _chosen(Device(device, name, autocast), reason, precision, emit)
        full = full or (fault if is_out_of_memory(RuntimeError(fault)) else "")
        if named and not full:
            raise UsageError(f"--device {wanted}: {name} cannot train: {fault}")
        emit(Log(f"{device} ({name}) is left out: {fault}", "warning"))
        skipped = " that works"
    if full:  # of other programs; on the CPU this peer would stay when they have ended
        raise TTError(f"no memory is free on the GPU: {full}")
    if not named and not skipped and (hidden := hardware.hidden()):
        emit(Log(f"training on the CPU: {hidden}", "warning"))
    reason = f"--device {wanted}" if named else f"no GPU{skipped or ' that torch can use'}"
    autocast, precision = _precision_of_cpu(task.width)
    cpu = Device(torch.device("cpu"), f"CPU, {torch.get_num_threads()} threads", autocast)
    return _chosen(cpu, reason, precision, emit)


def _chosen(device: Device, reason: str, precision: tuple[str, str], emit: Emit) -> Device:
    emit(Choice("device", str(device.torch_device), f"{device.name}: {reason}"))
    emit(Choice("precision", *precision))
    return device


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
    fastest = min(timeit.repeat(lambda: torch.nn.functional.linear(x, weight), number=1, repeat=3))
    return 2 * 512 * dim * 8 * dim / fastest


def named_device(wanted: str, hardware: Hardware) -> torch.device:
    """The device of --device. Raises UsageError where there is none."""
    match = DEVICE.fullmatch(wanted)
    if match is None:
        raise UsageError(f"--device {wanted}: no such device: give cpu, cuda, cuda:N, mps or xpu")
    if wanted == "cpu":
        return torch.device("cpu")
    kind, index = match[1] or wanted, int(match[2] or 0)
    if index >= (count := hardware.count(kind)):
        hidden = (hardware.hidden() if kind == "cuda" else "") or "give --device cpu or check the driver"
        raise UsageError(f"--device {wanted}: torch sees {count} GPUs here: {hidden}")
    return torch.device(kind, index)

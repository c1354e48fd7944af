"""Memory that is free, mappings for large tensors, and what glibc does with what was freed.

By default blocks above 32 MiB are taken from the system at every allocation and given back at once, and so is the end
of the heap: every activation is paged in anew. Measured on two cores at the paper's size, a training step of 16
layers took a twentieth less time without that (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from tt_cli.errors import first_line, is_out_of_memory
from tt_cli.supervisor.host_memory import host_memory

Result = TypeVar("Result")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ALIGNMENT = 64  # bytes
_REUSED = 1 << 30  # bytes: blocks up to this size, and as much free memory at the heap's end, stay with the process


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks; False where the C library is not glibc. Call it before the first work."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(key, _REUSED) for key in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def mapped_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of the same shapes and types, contiguous, in one mapping of their own.

    Processes that are forked do not inherit it: they would keep a second copy of every page that changes here. It goes
    back to the system when the last of these tensors is gone.
    """
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not size:
        return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(getattr(mmap, advice))
    return {
        name: torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=starts[name]).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor)
        for name, tensor in tensors.items()
    }


class DeviceMemory(NamedTuple):
    """Bytes on an accelerator: in this process's tensors now and at most so far; free for more of them; in all."""

    taken: int
    peak: int
    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Ask the driver and torch's allocator."""
    if device.type == "mps":  # it takes RAM, of which the system recommends a share, and keeps no highest mark
        taken, total = torch.mps.current_allocated_memory(), torch.mps.recommended_max_memory()
        return DeviceMemory(taken, torch.mps.driver_allocated_memory(), total - taken, total)
    gpu = torch.get_device_module(device)
    (free, total), taken = gpu.mem_get_info(device), gpu.memory_allocated(device)
    return DeviceMemory(taken, gpu.max_memory_allocated(device), free + gpu.memory_reserved(device) - taken, total)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device (for the CPU: of memory, or of the container's share of it)."""
    return host_memory().free if device.type == "cpu" else device_memory(device).free


def attempt(work: Callable[[], Result]) -> tuple[Result | None, str]:
    """The result of `work`, and ""; None and the allocator's words where memory runs out.

    The error goes then, and with it the tensors that its frames hold.
    """
    try:
        return work(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, first_line(error)

"""CPU time and memory of processes, as Linux tells them; time and memory of work on a device."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch

Look = TypeVar("Look")
HEAPS_SECONDS, LOOK_SECONDS = 0.02, 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a living process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def family_cpu_seconds(root: int) -> float:
    """Of a process and all below it, since each began."""
    from tt_cli.supervisor.processes import family_of

    total = 0.0
    for pid in family_of(root):
        try:
            total += cpu_seconds(pid)
        except OSError:  # it has ended
            continue
    return total


def status_bytes(field: str, pid: int | str = "self") -> int:
    """A size of /proc/…/status: VmRSS, resident now; VmHWM, at most since `forget_peak`; RssAnon, in no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def forget_peak() -> None:
    """Let VmHWM of this process begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


class PeakMemory:
    """The most memory of this process, or on a GPU of torch's allocator, while it is entered.

    before: bytes at its beginning; peak: at most.
    """

    def __init__(self, device: torch.device):
        self._gpu, self.before, self.peak = device.type == "cuda", 0, 0

    def __enter__(self) -> PeakMemory:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            forget_peak()
        self.before = torch.cuda.memory_allocated() if self._gpu else status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated() if self._gpu else status_bytes("VmHWM")


def seconds_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until everything is done, on a GPU too."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    began = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - began


class FamilyWatch(Generic[Look]):
    """Looks at families of processes once a second, and at once when their heaps reach a new height. A context.

    pids: name → the process at the family's head. look: what is kept of it, in `looks` by name, oldest first.
    """

    def __init__(self, pids: Mapping[str, int], look: Callable[[int], Look]):
        self._pids, self._look = pids, look
        self.looks: dict[str, list[Look]] = {name: [] for name in pids}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FamilyWatch[Look]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        from tt_cli.supervisor.processes import family_of

        highest, due = dict.fromkeys(self._pids, 0.0), dict.fromkeys(self._pids, 0.0)
        while not self._ended.wait(HEAPS_SECONDS):
            for name, pid in self._pids.items():
                with contextlib.suppress(OSError, IndexError):  # it is ending
                    heaps = sum(status_bytes("RssAnon", process) for process in family_of(pid))
                    if heaps > highest[name] * 1.003 or time.monotonic() > due[name]:
                        highest[name], due[name] = max(heaps, highest[name]), time.monotonic() + LOOK_SECONDS
                        self.looks[name].append(self._look(pid))

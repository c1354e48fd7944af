"""Ends of processes that another process has started, for tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


class ProcessWatch:
    """Holds on to processes, so that their ends can be awaited even when their numbers are used again."""

    def __init__(self, pids: Iterable[int]):
        self._processes: list[psutil.Process] = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(pid))

    def left_after(self, seconds: float) -> set[int]:
        """Wait for all to end; returns those that still live after `seconds`."""
        _, living = psutil.wait_procs(self._processes, seconds)
        return {process.pid for process in living if _runs(process)}


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False

"""Processes of this machine (Linux): children, ends, who is left; and the memory that this one does not need."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import sys
import time
from pathlib import Path


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children of a process."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    return []


def family_of(pid: int) -> set[int]:
    """A process and all that descend from it."""
    return {pid}.union(*(family_of(child) for child in children_of(pid)))


def release_freed_memory() -> None:
    """Give what this process has freed back to the system, where the C library is glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None:
        trim(0)


def keep_objects_shared() -> None:
    """Call it before a fork: the child shares the objects that there are for as long as nobody changes them.

    A collection of garbage writes into every object that it looks at; in a child it would copy all that the child
    inherited, 60 MB of modules. What there is now is not looked at any more, here and there.
    """
    gc.collect()
    gc.freeze()


class ProcessWatch:
    """Holds on to processes, so that their ends can be awaited even when their numbers are used again."""

    def __init__(self, pids: set[int]):
        self._open: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._open[os.pidfd_open(pid)] = pid

    def left_after(self, seconds: float) -> set[int]:
        """Wait for all to end; returns those that still live after `seconds`. Call it once."""
        poll, deadline = select.poll(), time.monotonic() + seconds
        waiting = dict(self._open)
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                del waiting[descriptor]
        for descriptor in self._open:
            os.close(descriptor)
        return set(waiting.values())

"""Ends of processes that another process has started, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable


class ProcessWatch:
    """Holds on to processes, so that their ends can be awaited even when their numbers are used again."""

    def __init__(self, pids: Iterable[int]):
        self._living: dict[int, int] = {}  # descriptor of a process → its number
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._living[os.pidfd_open(pid)] = pid

    def left_after(self, seconds: float) -> set[int]:
        """Wait for all to end, whether or not somebody has asked how; returns those that still live after `seconds`."""
        ends, deadline = select.poll(), time.monotonic() + seconds
        for descriptor in self._living:
            ends.register(descriptor, select.POLLIN)
        while self._living and (ended := ends.poll(1000 * max(0.0, deadline - time.monotonic()))):
            for descriptor, _ in ended:
                ends.unregister(descriptor)
                os.close(descriptor)
                del self._living[descriptor]
        return set(self._living.values())

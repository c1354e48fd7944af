"""Samples per second of this peer, over the last half minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30.0


class Throughput:
    """A moving mean that follows pauses: time without samples lowers it. For any thread. total: of all samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: deque[tuple[float, int]] = deque()
        self._started = clock()
        self.total = 0

    def add(self, samples: int) -> None:
        """Count samples that have just been computed."""
        with self._lock:
            self._counts.append((self._clock(), samples))
            self.total += samples

    def per_second(self) -> float:
        """Samples per second over the window, or since the start when that is shorter."""
        now = self._clock()
        with self._lock:
            while self._counts and self._counts[0][0] < now - WINDOW_SECONDS:
                self._counts.popleft()
            samples = sum(count for _, count in self._counts)
        seconds = min(WINDOW_SECONDS, now - self._started)
        return samples / seconds if seconds > 0 else 0.0

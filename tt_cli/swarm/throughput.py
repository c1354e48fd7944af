"""Samples per second of this peer, over the last half minute."""

from __future__ import annotations

import time
from collections import deque

WINDOW_SECONDS = 30.0


class Throughput:
    """A moving mean that follows pauses: time without samples lowers it."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()

    def add(self, samples: int) -> None:
        """Count samples that have just been computed."""
        self._counts.append((time.monotonic(), samples))

    def per_second(self) -> float:
        """Samples per second over the window, or since the start when that is shorter."""
        now = time.monotonic()
        while self._counts and self._counts[0][0] < now - WINDOW_SECONDS:
            self._counts.popleft()
        seconds = min(WINDOW_SECONDS, now - self._started)
        return sum(count for _, count in self._counts) / seconds if seconds > 0 else 0.0

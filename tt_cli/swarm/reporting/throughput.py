"""Rates: of work, over a window of time, and of the bytes of a line, over whole steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tt_cli.swarm.records.peer_record import MAX_NUMBER

WINDOW_SECONDS = 30.0


class Throughput:
    """A moving mean of samples, or of bytes, that follows pauses. For any thread. total: of all that was counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, window: float = WINDOW_SECONDS) -> None:
        self._clock, self._window = clock, window
        self._lock = threading.Lock()
        self._counts: deque[tuple[float, int]] = deque()
        self._started = clock()
        self.total = self._gone = 0  # gone: counted before the window

    def add(self, count: int) -> None:
        with self._lock:
            self._counts.append((self._clock(), count))
            self.total += count

    def per_second(self) -> float:
        """Over the window, or since the start when that is shorter."""
        now = self._clock()
        with self._lock:
            while self._counts and self._counts[0][0] <= now - self._window:
                self._gone += self._counts.popleft()[1]
            done = self.total - self._gone
        seconds = min(self._window, now - self._started)
        return done / seconds if seconds > 0 else 0.0


def bytes_per_hour(marks: Sequence[tuple[float, ...]]) -> list[int]:
    """Sent and received, by (seconds, sent, received) after each global step: bytes come in rounds, once in a step."""
    if not marks or not (seconds := marks[-1][0] - marks[0][0]):
        return [0, 0]
    return [
        round(min(MAX_NUMBER, 3600 * (last - first) / seconds))
        for first, last in zip(marks[0][1:], marks[-1][1:], strict=True)
    ]

"""The recorded steps in memory, as columns, to be thinned in milliseconds: 4 MB for 100,000 of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tt_cli.history.reader import HistoryReader

LOOK_SECONDS = 1.0
PAGE = 100_000  # steps read at once
LOSS = 2
Step = tuple[int, float, float, int, float]  # see HistoryReader.steps_after
Columns = NDArray[np.float64]  # [5, steps]


class StepColumns:
    """Follows a source's steps; thread-safe: what has been read is never changed, only replaced."""

    def __init__(self, source: HistoryReader):
        self._source, self._lock = source, threading.Lock()
        self._columns: Columns = np.empty((5, 0))
        self._era, self._looked_at = "", -float("inf")

    def look(self) -> None:
        """Read what is new, at most once a second; after a way back, the steps that are left."""
        with self._lock:
            if time.monotonic() < self._looked_at + LOOK_SECONDS:
                return
            era = self._source.era()
            if era != self._era:
                self._era, self._columns = era, np.empty((5, 0))
            while page := self._source.steps_after(self._last(), PAGE):
                self._columns = np.hstack([self._columns, np.array(page, dtype=np.float64).T])
                if len(page) < PAGE:
                    break
            self._looked_at = time.monotonic()

    def _last(self) -> int:
        return int(self._columns[0, -1]) if self._columns.size else 0

    @property
    def mark(self) -> tuple[str, int]:
        """Changes when the steps do."""
        return self._era, self._columns.shape[1]

    def after(self, mark: tuple[str, int], most: int) -> list[Step]:
        """The last steps since the mark was this, at most so many; after a way back, of all that are left."""
        (era, count), columns = mark, self._columns
        rows = columns[:, count if era == self._era else 0 :].T[-most:].tolist()
        return [(int(step), at, loss, int(trainers), speed) for step, at, loss, trainers, speed in rows]

    @property
    def newest(self) -> Step | None:
        """The last step."""
        return next(iter(self.after(("", 0), 1)), None)

    def thinned(self, points: int, first: int | None, last: int | None) -> dict[str, Any]:
        """At most `points` (4 or more) of the steps first … last, as /api/history answers them.

        Both ends stay, and the lowest and the highest loss of each of equally many steps in between.
        """
        columns = self._columns
        steps = columns[0]
        low = 0 if first is None else int(np.searchsorted(steps, first))
        high = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
        part = columns[:, low:high]
        if part.shape[1] > points:
            part = part[:, kept(part[LOSS], points)]
        step, at, loss, trainers, speed = part.tolist()
        return {
            "step": [int(value) for value in step],
            "time": [round(value, 1) for value in at],
            "loss": [float(f"{value:.6g}") for value in loss],
            "peers": [int(value) for value in trainers],
            "samples_per_second": [float(f"{value:.4g}") for value in speed],
            "last_step": int(steps[-1]) if len(steps) else 0,
            "total": len(steps),
        }


def kept(loss: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """Indices, in order, of both ends and of each bucket's lowest and highest value: at most `points` (4 or more)."""
    buckets = max(1, points // 2 - 1)
    size = -(-len(loss) // buckets)
    starts = np.arange(0, len(loss), size)
    padded = np.full(len(starts) * size, np.nan)
    padded[: len(loss)] = loss
    table = padded.reshape(-1, size)
    lowest, highest = (np.where(np.isnan(table), fill, table) for fill in (np.inf, -np.inf))
    indices = [[0, len(loss) - 1], starts + lowest.argmin(1), starts + highest.argmax(1)]
    return np.unique(np.concatenate(indices)).astype(np.int64)

"""Losses that jump out of their usual range."""

from __future__ import annotations

import math

MEMORY = 0.95  # of what the mean and the spread were before: about twenty steps
CALM = 10  # steps before anything is unusual
SPREADS, SHARE = 6.0, 0.1  # a jump is larger than so many spreads and than this part of the mean


class LossSpikeDetector:
    """Keeps a running mean of the losses and of their distance from it."""

    def __init__(self) -> None:
        self._mean = self._spread = 0.0
        self._steps = 0

    def look(self, loss: float) -> str:
        """Words when this step's loss is far above the usual, else "".

        A spike counts for later steps with as much as is usual: it must not hide the next one.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        usual = self._mean
        largest = usual + max(SPREADS * self._spread, SHARE * abs(usual))
        jumped = self._steps >= CALM and loss > largest
        counted = min(loss, largest) if self._steps >= CALM else loss
        keep = min(MEMORY, self._steps / (self._steps + 1))
        if self._steps:
            self._spread = keep * self._spread + (1 - keep) * abs(counted - usual)
        self._mean = keep * usual + (1 - keep) * counted
        self._steps += 1
        return f"the loss jumped to {loss:.4g} from a usual {usual:.4g}" if jumped else ""

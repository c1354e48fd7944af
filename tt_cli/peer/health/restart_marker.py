"""How long ago this peer was started again for one cause, kept over the restart in the age of a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RestartMarker:
    """Of one cause. apart: seconds between two restarts. clock: Unix time."""

    path: Path
    apart: float
    clock: Callable[[], float] = time.time

    def lately(self) -> bool:
        """True when another restart would come too soon."""
        try:
            return self.clock() < self.path.stat().st_mtime + self.apart
        except OSError:
            return False

    def note(self) -> None:
        """The peer is about to be started again."""
        self.path.touch(mode=0o600)
        os.utime(self.path, (self.clock(), self.clock()))

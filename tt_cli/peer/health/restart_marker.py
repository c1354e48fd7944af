"""Memory of a peer's last restart for one cause, kept in the age of a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RestartMarker:
    """Marker of one cause. path: the file. apart: seconds between two restarts. clock: Unix time."""

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
        """Mark a restart that begins now."""
        self.path.touch(mode=0o600)
        os.utime(self.path, (self.clock(), self.clock()))

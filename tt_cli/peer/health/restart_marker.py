"""Memory of a peer's last restart for one cause, kept in the age of a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def may_restart(marker: Path, apart: float, now: float) -> bool:
    """Mark a restart at `now` (Unix time); False less than `apart` seconds after the last, and where none is marked."""
    with contextlib.suppress(OSError):
        if marker.exists() and 0 <= now - marker.stat().st_mtime < apart:
            return False
        marker.touch(mode=0o600)
        os.utime(marker, (now, now))
        return True
    return False

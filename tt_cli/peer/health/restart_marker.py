"""Memory of a peer's last restart for one cause, kept in the age of a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def may_restart(marker: Path, apart: float, now: float) -> bool:
    """Mark a restart that begins at `now` (Unix time); False where the last one is less than `apart` seconds ago.

    False, too, where it cannot be marked: it would be followed by another one at once.
    """
    with contextlib.suppress(OSError):
        if marker.exists() and 0 <= now - marker.stat().st_mtime < apart:
            return False
        marker.touch(mode=0o600)
        os.utime(marker, (now, now))
        return True
    return False

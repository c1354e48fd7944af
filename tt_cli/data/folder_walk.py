"""All files under a folder, in an order that is the same every time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def files_below(folder: Path, unreadable: Callable[[OSError], None]) -> list[Path]:
    """All files in the order of their paths: links are followed, each folder once; names with a leading dot left out.

    unreadable: called for a folder that cannot be read, which is left out if it returns.
    """
    entered: set[tuple[int, int]] = set()
    files: list[Path] = []
    for here, below, names in os.walk(folder, followlinks=True, onerror=unreadable):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:  # a loop of links
            below.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        below[:] = sorted(name for name in below if not name.startswith("."))
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files)

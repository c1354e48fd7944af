"""What a process and all that it started has computed so far, and on what."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tt_cli.supervisor.processes import family_of

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """Of a process and all below it, since each began."""
    total = 0.0
    for pid in family_of(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def machine() -> str:
    """The processor and Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}"

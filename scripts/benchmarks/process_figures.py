"""CPU time and memory of processes, as Linux tells them."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a living process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def family_cpu_seconds(root: int) -> float:
    """Of a process and all below it, since each began."""
    from tt_cli.supervisor.processes import family_of

    total = 0.0
    for pid in family_of(root):
        try:
            total += cpu_seconds(pid)
        except OSError:  # it has ended
            continue
    return total


def status_bytes(field: str, pid: int | str = "self") -> int:
    """A size of /proc/…/status: VmRSS, resident now; VmHWM, at most since `forget_peak`; RssAnon, in no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def forget_peak() -> None:
    """Let VmHWM of this process begin anew."""
    Path("/proc/self/clear_refs").write_text("5")

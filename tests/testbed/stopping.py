"""Stopping a process by SIGSTOP, so that it hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def stop(pid: int) -> None:
    """Stop a process; when this returns, all of its threads are: on a busy machine others go on until one has heard."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any((threads / name / "stat").read_text().rpartition(") ")[2][0] != "T" for name in os.listdir(threads)):
        pass

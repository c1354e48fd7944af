"""The bond of a process to another one, not always its parent, with which it ends."""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(process: int) -> None:
    """Have this process be killed when that one ends, however it does, and leave Ctrl-C to it (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()

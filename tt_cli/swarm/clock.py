"""Time and threads of a peer: those of its machine, or the simulator's (tests/simulation), whose clock is virtual."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


def loop_time() -> float:
    """Seconds by the running event loop's clock."""
    return asyncio.get_running_loop().time()


class Clock:
    """This machine's. monotonic: seconds. boottime: the same, and goes on while the machine sleeps.

    dht_time: Unix seconds, by which hivemind's DHT goes. condition: what threads wait on.
    """

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    dht_time: Callable[[], float] = staticmethod(time.time)
    boottime: Callable[[], float] = staticmethod(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    condition: Callable[[], threading.Condition] = staticmethod(threading.Condition)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread that has begun, and does not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

"""A trainer of a closed run that counts, in all its processes, what its doors check, and tells it each step.

One JSON object a step: `epoch`; `requests`, calls and streams, its own and those of others; `admits`, looks at a
pass at any door; `admit_s`, CPU seconds of those looks; `cpu_s`, of the whole peer; `at`, seconds. All since it began.
"""

from __future__ import annotations

import json
import os
import time
from multiprocessing import Array
from typing import Any

from scripts.benchmarks.process_figures import family_cpu_seconds
from testbed import peer
from tt_cli.supervisor.events import Emit, Event, Log, Step
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.pass_guard import PassGuard

REQUESTS, ADMITS, NANOSECONDS = range(3)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As those of `testbed.peer`."""
    counts = Array("q", 3)  # what forks from here has it too
    admit, enter, call = Admission.admit, PassGuard.admit, PassGuard.call

    def count(which: int, by: int) -> None:
        with counts.get_lock():
            counts[which] += by

    def admitting(*args: Any, **more: Any) -> str:
        began = time.thread_time_ns()
        try:
            return admit(*args, **more)
        finally:
            spent = time.thread_time_ns() - began
            count(ADMITS, 1)
            count(NANOSECONDS, spent)

    def entering(*args: Any, **more: Any) -> None:
        count(REQUESTS, 1)
        enter(*args, **more)

    async def calling(*args: Any, **more: Any) -> bytes:
        count(REQUESTS, 1)
        return await call(*args, **more)

    def noting(event: Event) -> None:
        emit(event)
        if isinstance(event, Step):
            told = {"epoch": event.epoch, "at": time.monotonic(), "cpu_s": family_cpu_seconds(os.getpid())}
            told |= {"requests": counts[REQUESTS], "admits": counts[ADMITS], "admit_s": counts[NANOSECONDS] / 1e9}
            emit(Log(json.dumps(told)))

    Admission.admit = admitting  # type: ignore[method-assign]
    PassGuard.admit, PassGuard.call = entering, calling  # type: ignore[method-assign]
    peer.main(options, noting, orders)

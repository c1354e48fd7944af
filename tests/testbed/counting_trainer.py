"""A trainer of a closed run that counts, in all its processes, what its doors check, and tells it each step.

One JSON object a step: `epoch`; `requests`, calls through the DHT's door, its own and those of others; `admits`, looks
at a pass at any door; `admit_s`, CPU seconds of those looks; `cpu_s`, of the whole peer; `at`, seconds. All since it
began.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from multiprocessing import Array
from typing import Any

from hivemind.p2p import PeerID

from scripts.benchmarks.process_figures import family_cpu_seconds
from testbed import peer
from tt_cli.supervisor.events import Emit, Event, Log, Step
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.network.dht_node import start_dht
from tt_cli.swarm.network.reachability import start_reachable_dht

REQUESTS, ADMITS, NANOSECONDS = range(3)
COUNTS = Array("q", 3)  # what forks from here has it too


def count(which: int, by: int = 1) -> None:
    with COUNTS.get_lock():
        COUNTS[which] += by


class CountingAdmission(Admission):
    def admit(self, text: str, peer_id: str, now: float | None = None) -> str:
        began = time.thread_time_ns()
        try:
            return super().admit(text, peer_id, now)
        finally:
            spent = time.thread_time_ns() - began
            count(ADMITS)
            count(NANOSECONDS, spent)


class CountingGuard(PassGuard):
    def admit(self, text: bytes, caller: PeerID) -> None:
        count(REQUESTS)
        super().admit(text, caller)

    async def call(self, *args: Any) -> bytes:
        count(REQUESTS)
        return await super().call(*args)


class CountingAuthorizer(DHTAuthorizer):
    admission_type, guard_type = CountingAdmission, CountingGuard


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As those of `testbed.peer`."""

    def noting(event: Event) -> None:
        emit(event)
        if isinstance(event, Step):
            told = {"epoch": event.epoch, "at": time.monotonic(), "cpu_s": family_cpu_seconds(os.getpid())}
            told |= {"requests": COUNTS[REQUESTS], "admits": COUNTS[ADMITS], "admit_s": COUNTS[NANOSECONDS] / 1e9}
            emit(Log(json.dumps(told)))

    node = partial(start_dht, authorizer=CountingAuthorizer)
    peer.main(options, noting, orders, start_dht=partial(start_reachable_dht, node=node))

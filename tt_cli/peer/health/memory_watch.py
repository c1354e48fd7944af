"""Watches the host's memory while a peer trains, so that the peer gives way before the kernel kills something.

A thread looks every few seconds at what the peer's processes take together (against --memory), and at what the machine
or its container leaves free. Near the limit the peer gives back what it has freed and, on a CPU, computes fewer
examples at a time; the data stream holds little ahead that could be lowered. Over it the peer
ends itself with a backup, and its supervisor starts it again: once an hour at most, and only where that gives memory
back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tt_cli.errors import TTError
from tt_cli.memory import shown
from tt_cli.peer.health.restart_marker import may_restart
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.host_memory import HostMemory, family_memory, host_memory
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.supervisor.reporter import WorkerBroken

LOOK_SECONDS = 3.0
NEAR = 0.95  # of --memory
LEAST_FREE, LEAST_SHARE = 256 << 20, 0.02  # bytes, and of all there is: below this something is ended soon
GAIN = 1.1  # a restart pays when the family takes so many times what it should
RESTART_SECONDS = 3600.0
AGAIN_SECONDS = 3600.0  # until the same warning is said once more

NOTHING, CLOSE, OVER = 0, 1, 2


@dataclass(frozen=True)
class Look:
    """One look: how bad it is (NOTHING, CLOSE or OVER), in words, and bytes that the family takes, where asked."""

    pressure: int
    words: str
    family: int


def judge(family_takes: Callable[[], int], host: HostMemory, memory: int | None) -> Look:
    """memory: what the family may take (--memory), in bytes. It is asked where that matters: it walks all pages."""
    least = max(LEAST_FREE, int(LEAST_SHARE * host.total))
    if memory is None and host.free >= 2 * least:
        return Look(NOTHING, "", 0)
    family = family_takes()
    left = f"only {shown(host.free)} of {shown(host.total)} are left on {host.whose}"
    takes = f"this peer's processes take {shown(family)}"
    if memory is not None and family > memory:
        return Look(OVER, f"{takes}, more than the {shown(memory)} of --memory", family)
    if host.free < least:
        return Look(OVER, f"{left}, {takes}", family)
    if memory is not None and family > NEAR * memory:
        return Look(CLOSE, f"{takes}, nearly all of the {shown(memory)} of --memory", family)
    if host.free < 2 * least:
        return Look(CLOSE, f"{left}, {takes}", family)
    return Look(NOTHING, "", family)


class MemoryWatch:
    """A context manager: looks from its own thread; `relieve`, called by the training loop, acts.

    lower: whether fewer examples at a time take less of the host's memory (a CPU trains). expected: bytes that the
    family should take. marker: a file whose age tells when the peer was last restarted for memory.
    """

    def __init__(
        self,
        memory: int | None,
        expected: int,
        marker: Path,
        emit: Emit,
        *,
        lower: bool,
        family: Callable[[], int] = lambda: sum(family_memory(os.getpid())),
        host: Callable[[], HostMemory] = host_memory,
        clock: Callable[[], float] = time.time,
    ):
        self._memory, self._expected, self._emit, self._lower = memory, expected, emit, lower
        self._marker, self._family, self._host, self._clock = marker, family, host, clock
        self._warned = float("-inf")
        self._ended = threading.Event()
        self.last = Look(NOTHING, "", 0)
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Once; gives freed memory back where it is near the limit, and looks again."""
        look = judge(self._family, self._host(), self._memory)
        if look.pressure:
            release_freed_memory()
            look = judge(self._family, self._host(), self._memory)
        self.last = look

    def relieve(self, batches: MicroBatches, held: str = "") -> None:
        """Do what the last look asks for, between micro-batches. held: why none is computed: only a restart helps then.

        Raises WorkerBroken where a new process would take less, TTError where --memory is too little all the same.
        """
        look = self.last
        if not look.pressure or (held and (look.pressure != OVER or look.family <= GAIN * self._expected)):
            return
        if not held and self._lower and batches.now > 1:
            batches.halve(f"{look.words}; the data stream holds little ahead that could be lowered")
            self.look()
        elif look.pressure == OVER:
            self._give_way(look)
        else:
            self._warn(f"{look.words}: there is nothing that this peer could lower")

    def _give_way(self, look: Look) -> None:
        if look.family > GAIN * self._expected and may_restart(self._marker, RESTART_SECONDS, self._clock()):
            raise WorkerBroken(f"{look.words}: beginning anew from a backup before something is ended for it")
        if self._memory is not None and look.family > self._memory:
            raise TTError(
                f"{look.words}, and beginning anew would not change that: give --memory "
                f"{look.family * 1.2 / 1e9:.1f}GB, or --batch-size 1"
            )
        self._warn(f"{look.words}: close other programs, or the system may end one of them or this peer")

    def _warn(self, words: str) -> None:
        if self._clock() > self._warned + AGAIN_SECONDS:
            self._warned = self._clock()
            self._emit(Log(words, "warning"))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()

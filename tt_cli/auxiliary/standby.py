"""Start of the assistant where no step is made without it: all trainers are in client mode, and nobody can dial them.

So it is with the first volunteers of most runs, whose routers let nobody in, and with notebooks. Of several auxiliary
peers the one that leads does it, or any of them where that one does not. Once started it stays: what it does is worth
its memory while anybody trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.errors import TTError
from tt_cli.memory import shown
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Event, Log, Snapshot
from tt_cli.supervisor.host_memory import HostMemory, host_memory
from tt_cli.task import task_of

PATIENCE_SECONDS = 20.0  # somebody who accepts connections may be joining
LEADER_SECONDS = 120.0  # more, for who leads: it may not have the memory, or lie
AGAIN_SECONDS = 600.0  # after it could not be started


class Standby(AbstractContextManager["Standby"]):
    """A context manager; `show` passes all events on to `emit`.

    start: begins the assistant, which goes on until this is left; raises TTError where it cannot. It runs in the thread
    that shows the coordinator's snapshots. memory: what is free, asked before that.
    """

    def __init__(
        self,
        run: RunConfig,
        emit: Emit,
        start: Callable[[], AbstractContextManager[object]],
        memory: Callable[[], HostMemory] = host_memory,
    ):
        self._run, self._emit, self._start, self._memory = run, emit, start, memory
        self._lease = LeaseFile(folders.run_folder(run))
        self._running = ExitStack()
        self._started = False
        self._due_at: float | None = None
        self._told = ""

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def show(self, event: Event) -> None:
        """Pass it on; look at the swarm where it tells of that."""
        self._emit(event)
        if isinstance(event, Snapshot) and not self._started:
            self._look(waiting_trainers(event.swarm["peers"]))

    def _look(self, waiting: int) -> None:
        now = time.monotonic()
        if not waiting:
            self._due_at = None
        elif self._due_at is None:
            self._due_at = now + PATIENCE_SECONDS
        elif now >= self._due_at + LEADER_SECONDS or (now >= self._due_at and not self._lease.other()):
            self._due_at = now + AGAIN_SECONDS
            self._begin(waiting)

    def _begin(self, waiting: int) -> None:
        who = "the only trainer is" if waiting == 1 else f"all {waiting} trainers are"
        why = f"{who} in client mode, so nobody can make a step"
        # at most: it computes no gradients
        free, takes = self._memory(), task_of(self._run).need("cpu").host
        of = f"{shown(free.free)} of {free.whose}'s {shown(free.total)} free, it takes at most {shown(takes)}"
        if free.free < takes:
            self._tell(f"{why}, and no assistant is started by itself: {of}; --assist starts it all the same", "error")
            return
        try:
            self._running.enter_context(self._start())
        except TTError as error:
            self._tell(f"{why}, and the assistant does not start: {error}; it is tried again", "error")
            return
        self._started = True
        self._tell(f"{why}: starting the assistant, as with --assist; {of}", "info")

    def _tell(self, words: str, level: str) -> None:
        """Once, until there is something else to tell."""
        if words.partition(":")[0] != self._told:
            self._told = words.partition(":")[0]
            self._emit(Log(words, level))


def waiting_trainers(peers: Iterable[Mapping[str, Any]]) -> int:
    """Number of trainers that a snapshot names, none where somebody among those who average accepts connections."""
    average = [peer for peer in peers if peer["role"] in ("trainer", "assistant")]
    reachable = any(not peer["client_mode"] for peer in average)
    return 0 if reachable else sum(peer["role"] == "trainer" for peer in average)

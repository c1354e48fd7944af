"""How a peer that is behind, or that differs, comes to hold what the others hold.

Who is one step behind and held the same state before asks for the average that the others stepped with: a byte for
each parameter instead of six, and the step is made here. Everybody else takes over the state, of which only the chunks
travel whose hashes differ. Both end in a state whose digest most of the foremost members signed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from tt_cli.supervisor.events import Download, Emit, Log, Synchronised
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.board import View
from tt_cli.swarm.encoded import DecodedGradients
from tt_cli.swarm.guarded import GuardedState
from tt_cli.swarm.handover import NoState

STATE_SECONDS, AVERAGE_SECONDS = 180.0, 120.0  # without a chunk; for all of it
RATE_SECONDS = 5.0


class TakeOver:
    """Brings `state` to what the others hold; `averager` asks them."""

    def __init__(self, peer_id: str, averager: Averager, state: GuardedState, emit: Emit):
        self._peer_id, self._averager, self._state, self._emit = peer_id, averager, state, emit

    def catch_up(self, view: View, tell: Callable[[str, str], None]) -> bool:
        """One attempt to come to the view's state; False when it failed, which is told. tell: phase and reason."""
        if self._may_repeat_step(view):
            tell("syncing", f"taking over the average of step {view.epoch}")
            if self._repeat_step(view):
                return True
        tell("syncing", f"taking over step {view.epoch}")
        return self._take_state()

    def _may_repeat_step(self, view: View) -> bool:
        """The others are one step ahead. If they were elsewhere before, they have no average for this peer's state."""
        return self._state.epoch > 0 and view.epoch == self._state.epoch + 1

    def _repeat_step(self, view: View) -> bool:
        started, before = time.monotonic(), int(self._averager.traffic[1])
        donors = [donor for donor in view.donors() if donor != self._peer_id]
        donor = self._averager.fetch_average(donors, self._state.key, AVERAGE_SECONDS)
        if donor is None:
            return False
        self._state.step(DecodedGradients(self._averager.store.buffer))
        if self._state.position != (view.epoch, view.digest):
            self._emit(Log(f"{donor} sent an average that does not lead to the others' state", "warning"))
            return False
        self._tell(donor, started, int(self._averager.traffic[1]) - before)
        return True

    def _take_state(self) -> bool:
        started = time.monotonic()
        try:
            taken = self._averager.take_state(self._state.tree(), STATE_SECONDS, DownloadProgress(self._emit))
            with taken.chunks:
                self._state.patch(taken)
                self._tell(taken.donors[0], started, taken.received, len(taken.chunks), taken.names())
        except (NoState, ValueError) as error:
            self._emit(Log(f"could not take over the others' state: {error}; trying again", "warning"))
            return False
        for donor, why in taken.refused.items():
            self._emit(Log(f"left out what {donor} sent: {why}", "warning"))
        return True

    def _tell(self, donor: str, started: float, received: int, chunks: int = 0, names: Sequence[str] = ()) -> None:
        self._emit(
            Synchronised(
                self._state.epoch,
                donor,
                self._state.digest,
                time.monotonic() - started,
                received,
                chunks=chunks,
                names=list(names),
            )
        )


class DownloadProgress:
    """Emits how far a state has come, with the rate of the last seconds."""

    def __init__(self, emit: Emit):
        self._emit = emit
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def __call__(self, received: int, total: int, donors: int) -> None:
        now = time.monotonic()
        while len(self._seen) > 1 and self._seen[0][0] < now - RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        self._seen.append((now, received))
        rate = max(0, received - before) / max(now - then, 1e-3)
        eta = (total - received) / rate if rate else None
        self._emit(Download(received, total, donors, bytes_per_second=rate, eta=eta))

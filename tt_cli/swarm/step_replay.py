"""Steps that the others make while this peer takes a state over: their averages are kept, and the steps made here too.

A state is six times as large as an average, and every step changes all of it: on a line on which it takes longer than a
step, whoever took only states would never arrive. With the averages of the steps made meanwhile, the state that came is
brought to where the others are.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hivemind.utils import get_logger

from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.shared_state import LockedState, RolledBack, state_key

logger = get_logger(__name__)

LOOK_SECONDS = 0.25
MOST_KEPT = 32  # averages
FETCH_SECONDS = 300.0  # for one
END_SECONDS = 10.0

Position = tuple[int, str]  # epoch and digest of a state


class StepReplay:
    """A context manager: while it is open, the average of every step that the others make is fetched and kept on disk.

    view: the newest view of the swarm. me: this peer's id.
    """

    def __init__(self, averager: Averager, view: Callable[[], SwarmState], me: str):
        self._averager, self._view, self._me = averager, view, me
        self._changed = threading.Condition()
        self._ending = False
        self._looks = 0
        self._wanted: deque[tuple[Position, Position, list[str]]] = deque()  # a state, the next one, who holds that
        self._kept: dict[Position, tuple[int, Position]] = {}  # state → place of its average, the state it leads to
        scratch = Path("/var/tmp")  # /tmp may be memory
        self._file = tempfile.TemporaryFile(dir=scratch if scratch.is_dir() else None)  # noqa: SIM115 - closed in __exit__
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._collect)]

    def __enter__(self) -> StepReplay:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._averager.drop_fetch()
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._file.close()

    def replay(self, state: LockedState) -> int:
        """Make the steps from `state` whose averages are here or on their way. Returns how many.

        It ends where an average is missing, or leads to another state than the one that members signed.
        """
        store, made = self._averager.store, 0
        buffer = GradientBuffer(store.layout, store.codec)
        while (found := self._wait_for(state.position)) is not None:
            place, leads_to = found
            with self._changed:
                self._file.seek(place * buffer.nbytes)
                buffer.load(self._file.read(buffer.nbytes))
            try:
                state.step(DecodedGradients(buffer))
            except RolledBack as error:
                logger.info(f"a missed step could not be made: {error}")
                break
            if state.position != leads_to:
                break
            made += 1
        return made

    def _wait_for(self, position: Position) -> tuple[int, Position] | None:
        """The average kept for this state, when all that the others have made by now is here or cannot be had."""
        with self._changed:
            looks = self._looks

            def known() -> bool:
                return self._ending or position in self._kept or (self._looks > looks + 1 and not self._wanted)

            self._changed.wait_for(known, FETCH_SECONDS)
            return self._kept.get(position)

    def _look(self) -> None:
        """Note every step that the others make."""
        known: Position | None = None
        with self._changed:
            while not self._ending:
                view = self._view()
                newest = (view.epoch, view.digest)
                if view.digest and newest != known:
                    if known is not None and newest[0] == known[0] + 1:
                        donors = [donor for donor in view.donors() if donor != self._me]
                        self._wanted.append((known, newest, donors))
                    known = newest
                self._looks += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ending, LOOK_SECONDS)

    def _collect(self) -> None:
        """Fetch their averages, one after the other: members keep the last ones for a while."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or bool(self._wanted))
                if self._ending:
                    return
                before, after, donors = self._wanted[0]
            try:
                if len(self._kept) < MOST_KEPT:
                    self._keep(before, after, donors)
            except OSError as error:  # a full disk: the state is taken over again if it comes too late
                logger.warning(f"the averages of missed steps are not kept: {error}")
            with self._changed:
                self._wanted.popleft()
                self._changed.notify_all()

    def _keep(self, before: Position, after: Position, donors: list[str]) -> None:
        if self._averager.fetch_average(donors, state_key(*before), FETCH_SECONDS) is None:
            return
        buffer = self._averager.store.buffer
        with self._changed:
            place = len(self._kept)
            self._file.seek(place * buffer.nbytes)
            self._file.write(buffer.dump())
            self._kept[before] = (place, after)

"""Steps that the others make while this peer takes a state over: their averages are kept, and the steps made here too.

A state is six times as large as an average: where it takes longer than a step, whoever took only states would never
arrive.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import IO

from hivemind.utils import get_logger

from tt_cli.errors import TTError
from tt_cli.run import RunConfig, folders
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.shared_state import LockedState, RolledBack
from tt_cli.swarm.state.client import NoState

logger = get_logger(__name__)

LOOK_SECONDS = 0.25
MOST_KEPT = 32  # averages
FETCH_SECONDS = 300.0  # for one
END_SECONDS = 10.0

Position = tuple[int, str]  # epoch and digest of a state


class StepReplay:
    """A context manager: while it is open, the average of every step that the others make is fetched and kept on disk.

    view: the newest view of the swarm. fetch: has the average with which the others stepped from a state to the view's
    in the store, in so many seconds, and returns who gave it, "" for nobody.
    """

    def __init__(
        self,
        run: RunConfig,
        averager: Averager,
        view: Callable[[], SwarmState],
        fetch: Callable[[SwarmState, Position, float], str],
    ):
        self._run, self._averager, self._view, self._average = run, averager, view, fetch
        self._changed = averager.clock.condition()
        self._ending, self._looks, self._kept = False, 0, 0
        self._steps: dict[Position, Position] = {}  # state → the one to which the others went on from it
        self._places: dict[Position, tuple[int, str] | None] = {}  # state → where the average is kept, and who gave it
        self._wanted: list[tuple[Position, SwarmState]] = []  # averages; members keep them for a while
        self._open = ExitStack()

    def __enter__(self) -> StepReplay:
        self._threads = [self._averager.clock.thread(work, "step replay") for work in (self._look, self._fetch)]
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._averager.drop_fetch()
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._open.close()

    @cached_property
    def _file(self) -> IO[bytes]:
        """Beside the backups: /tmp may be memory, and a container has nothing else to write to. OSError, TTError."""
        return self._open.enter_context(tempfile.TemporaryFile(dir=folders.run_folder(self._run)))

    def replay(self, state: LockedState) -> int:
        """Make the steps from `state` whose averages are here or on their way. Returns how many.

        It ends where an average is missing. Raises NoState where one leads to another state than members signed.
        """
        store, made = self._averager.store, 0
        buffer = GradientBuffer(store.layout, store.codec)
        while (step := self._step_from(state.position)) is not None:
            leads_to, (place, giver) = step
            with self._changed:
                self._file.seek(place * buffer.nbytes)
                buffer.load(self._file.read(buffer.nbytes))
            try:
                state.step(DecodedGradients(buffer))
            except RolledBack as error:
                logger.info(f"a missed step could not be made: {error}")
                break
            if state.position != leads_to:
                words = f"{giver} sent an average that does not lead to the others' step {leads_to[0]}"
                raise NoState(words, refused=[giver])
            made += 1
        return made

    def _step_from(self, position: Position) -> tuple[Position, tuple[int, str]] | None:
        """The state to which the others went on from this one, and its average's place and giver; None: none by now."""
        with self._changed:
            looks = self._looks
            self._changed.wait_for(lambda: position in self._steps or self._looks > looks + 1, FETCH_SECONDS)
            if position in self._steps:
                self._changed.wait_for(lambda: position in self._places, FETCH_SECONDS)
            place = self._places.get(position)
        return None if place is None else (self._steps[position], place)

    def _look(self) -> None:
        """Note every step that the others make, and have its average fetched."""
        known: Position | None = None
        with self._changed:
            while not self._ending:
                view = self._view()
                newest = (view.epoch, view.digest)
                if view.digest and newest != known:
                    if known is not None and newest[0] == known[0] + 1:
                        self._steps[known] = newest
                        self._wanted.append((known, view))
                    known = newest
                self._looks += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ending, LOOK_SECONDS)

    def _fetch(self) -> None:
        """Keep the averages that are wanted, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._ending)
                if self._ending:
                    return
                state, view = self._wanted.pop(0)
            place = self._keep(state, view)
            with self._changed:
                self._places[state] = place
                self._changed.notify_all()

    def _keep(self, state: Position, view: SwarmState) -> tuple[int, str] | None:
        """Fetch the average with which the others stepped from `state`. Returns its place, and who gave it."""
        if self._kept == MOST_KEPT or not (giver := self._average(view, state, FETCH_SECONDS)):
            return None
        buffer, place = self._averager.store.buffer, self._kept
        try:
            with self._changed:
                if self._ending:
                    return None
                self._file.seek(place * buffer.nbytes)
                self._file.write(buffer.dump())
                self._file.flush()
        except (OSError, TTError) as error:  # a full disk: the state is taken over again if it comes too late
            logger.warning(f"the averages of missed steps are not kept: {error}")
            return None
        self._kept += 1
        return place, giver

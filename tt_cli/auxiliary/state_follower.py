"""Follows the run's state for an auxiliary peer, by averages or by whole states, whichever is fewer bytes.

From one checkpoint to the next it either makes each step itself, with the average that members still keep of it; or,
where the averages of so many steps are more bytes than a state, it takes a state when the next checkpoint is due.
What one voter alone names may be a lie: it is followed if it is a later step, and there was the time to come to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low

from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.allreduce.average_buffer import KEPT_AVERAGES
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.catch_up import CatchUp
from tt_cli.swarm.records.consensus import SwarmState
from tt_cli.swarm.shared_state import Tree
from tt_cli.terminal.format import byte_count, plural

STEP_SECONDS = 0.2  # at least: no trainer that votes alone is followed further than it can have come
MIN_SECONDS = 3.0  # between two checkpoints
SHARE_OF_TIME = 0.1  # of the auxiliary peer's time goes into taking states at most
BYTES_A_SECOND = 1e6  # that its states take of the trainers' upload, in the mean, at most
AVERAGE_SECONDS = 300.0  # for one: a round may begin on the line of who gives it


class StateFollower:
    """Has the keeper hold what the swarm holds, and write checkpoints. look: the newest view of the swarm.

    follow: in a thread of its own, while nothing else changes what is held. broken: why this process must end.
    """

    def __init__(
        self,
        run: RunConfig,
        keeper: StateKeeper,
        averager: Averager,
        look: Callable[[], SwarmState],
        emit: Emit,
    ):
        self._keeper, self._averager, self._emit = keeper, averager, emit
        self._last_step, self._clock = run.schedule.total_steps, averager.clock.monotonic
        self._look, self._refused = look, False  # refused: told, since it last came to a state
        # from one donor at a time: it takes often, and every donor makes a copy of its state
        self._catch_up = CatchUp(run, averager, keeper.state, emit, look=look, at_once=1)
        self._average_bytes = float(averager.store.buffer.nbytes)  # then as the last one travelled
        self._seconds_a_byte = deque([0.0], maxlen=3)  # of the last that came; a single slow one came amid a round
        self._by_averages: bool | None = None  # None: not known yet which way is cheaper
        self.broken: WorkerBroken | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what led to the state: the keeper may hold another one."""
        self._due_at = 0.0  # when a checkpoint is to be written
        self._since: int | None = None  # the step of the last one
        self._made = 0  # steps since then, by averages
        self._chained = True  # the average of the next step was not missed
        self._met = False  # somebody who makes steps
        self._level_at = self._keeper.saved_at  # Unix time since when others can have made steps from what is held

    def wants(self, view: SwarmState) -> bool:
        """True when there is something to do now: a step to make, or a state to take."""
        self._met = self._met or any(record.averages for record in view.records)
        if self._met and view.epoch <= self._keeper.accepted[0]:
            self._level_at = self._averager.clock.dht_time()
        may = bool(view.digest) and (self._due(view) or self._may_step(view))
        return may and self._takes(view.epoch, view.digest, view)

    def follow(self, view: SwarmState) -> None:
        """Come to the view's state, or the one that most hold by then; what fails is told, and the one before kept."""
        due, steps = self._due(view), view.epoch - self._keeper.epoch
        started, before, came = self._clock(), int(self._averager.traffic[1]), False
        level_at = self._averager.clock.dht_time()

        def wanted(tree: Tree) -> bool:
            return self._takes(tree.step, tree.digest, view, self._look())

        try:
            if by_averages := self._may_step(view):
                came = self._catch_up.make_steps(view, AVERAGE_SECONDS)
            if due and not came:
                by_averages, came = False, self._catch_up.take_state(wanted, replays=bool(self._by_averages))
        except WorkerBroken as error:
            self.broken = error
            return
        seconds, received, self._chained = self._clock() - started, int(self._averager.traffic[1]) - before, came
        if came:
            self._keeper.accept()
            self._level_at, self._refused = level_at, False
        if came and received:
            self._seconds_a_byte.append(seconds / received)
        if by_averages and came:
            self._made, self._average_bytes = self._made + steps, received / steps
        if due and came:
            held = self._keeper.position
            self._keeper.save(sure=view.vouched(*held) or self._look().vouched(*held))
            self._choose()
        if due:
            of_a_byte = max(median_low(self._seconds_a_byte) / SHARE_OF_TIME, 1 / BYTES_A_SECOND)
            whole = self._keeper.trained.tree.nbytes * of_a_byte
            self._due_at = self._clock() + max(MIN_SECONDS, whole if came else min(whole, seconds / SHARE_OF_TIME))

    def _takes(self, step: int, digest: str, *views: SwarmState) -> bool:
        """Tell whether it would hold this: it is new, and the run can have come to it, or two voters say so."""
        if step < self._keeper.epoch or (step, digest) == self._keeper.position:
            return False
        (last, held), seconds = self._keeper.accepted, self._averager.clock.dht_time() - self._level_at
        steps = step - last
        if not held or (step, digest) == (last, held) or 0 < steps * STEP_SECONDS <= max(MIN_SECONDS, seconds):
            return True
        if any(view.vouched(step, "" if steps > 0 else digest) for view in views):
            return True
        if not self._refused:
            why = f"it came to step {last} with another state"
            if steps > 0:
                why = f"{max(0.0, seconds):.0f} s ago it was at step {last}"
            self._emit(Log(f"one trainer alone says that the run is at step {step}, and {why}: not taken", "warning"))
        self._refused = True
        return False

    def _due(self, view: SwarmState) -> bool:
        return view.epoch >= self._last_step or self._clock() >= self._due_at

    def _may_step(self, view: SwarmState) -> bool:
        """Members still keep the averages that lead from the state held to the view's, and a state would be dearer."""
        steps = view.epoch - self._keeper.epoch
        held = bool(self._keeper.position[1]) and self._chained and 0 < steps <= KEPT_AVERAGES
        return held and self._by_averages is not False and self._cheaper(self._made + steps)

    def _cheaper(self, steps: int) -> bool:
        return steps * self._average_bytes < self._keeper.trained.tree.nbytes

    def _choose(self) -> None:
        """The way to the next checkpoint, by the steps since the last one."""
        if self._since is not None:
            steps, before = self._keeper.epoch - self._since, self._by_averages
            self._by_averages = self._cheaper(steps)
            averages = f"the averages of {plural(steps, 'step')} ({byte_count(steps * self._average_bytes)})"
            state = f"a state ({byte_count(self._keeper.trained.tree.nbytes)})"
            if self._by_averages and not before:
                self._emit(Log(f"takes {averages} in place of {state}, while members keep them"))
            elif before is not self._by_averages:
                self._emit(Log(f"takes {state} in place of {averages}"))
        self._since, self._made = self._keeper.epoch, 0

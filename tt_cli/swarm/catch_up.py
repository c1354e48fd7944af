"""Catch-up: a peer that is behind, or that differs, comes to hold what the others hold.

Who is a step or two behind asks for the averages that the others stepped with: a byte for each parameter, not six.
Everybody else takes over the state, of which only the chunks travel whose hashes differ, and makes the steps that the
others make meanwhile. An auxiliary peer follows in the same two ways (`auxiliary/state_follower.py`). Both end in a
state whose digest most of the foremost members signed; so must a checkpoint on the Hub, unless this is the first peer
of a swarm, who begins with it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

from tt_cli.errors import TTError
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Download, Emit, Log, Synchronised, Trouble
from tt_cli.swarm.allreduce.average_buffer import KEPT_AVERAGES
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.allreduce.votes import liars_among
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients
from tt_cli.swarm.network.failures import classify
from tt_cli.swarm.records.consensus import voices, voters_among
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.reporting.throughput import Throughput
from tt_cli.swarm.shared_state import LockedState, RolledBack, StateLoader, Tree, state_key
from tt_cli.swarm.state.bridge import Chunks, NoState
from tt_cli.swarm.state.client import ATTEMPTS, STREAMS
from tt_cli.swarm.step_replay import StepReplay

STATE_SECONDS, AVERAGE_SECONDS = 180.0, 120.0  # without a chunk; for all of it
RATE_SECONDS = 5.0
FALSE_SECONDS = 600.0  # for which a false donor's state is nobody's goal
VAIN_ROUNDS = 5.0  # time limits of a round, after which a state that nobody is given is nobody's goal
HUB_SECONDS = 120.0  # between two looks at what the run publishes


class CatchUp:
    """Brings `state` to what the others hold. look: the newest view of the swarm. ways_back: see `OrganiserOrders`.

    at_once: donors of a state at most.
    """

    def __init__(
        self,
        run: RunConfig,
        averager: Averager,
        state: LockedState,
        emit: Emit,
        published: StateLoader | None = None,
        look: Callable[[], SwarmState] = lambda: SwarmState.of(()),
        ways_back: Callable[[RollBack], Iterable[StateLoader]] = lambda order: (),
        at_once: int = STREAMS,
    ):
        self._look, self._ways_back, self._at_once = look, ways_back, at_once
        self._run, self._averager, self._state, self._emit = run, averager, state, emit
        self._peer_id = str(averager.peer_id)
        self._published, self._looked = published, -math.inf
        self._false = dict[str, float]()  # who handed over what had to be refused, and nobody else had it → when
        self._slow = dict[str, float]()  # who was to give an average when the time for that was over → when
        self._vain = dict[str, tuple[float, int]]()  # whose state nobody gave → since when, in how many attempts
        self.ask_anew = threading.Event()  # set, to give up the state that is on its way, and ask for it again

    def attainable(self, view: SwarmState) -> SwarmState:
        """The swarm but for those who handed over a false state, whose own would be this peer's goal for ever."""
        false = self.false_among(view)
        records = [record for record in view.records if record.peer_id not in false]
        return view if len(records) == len(view.records) else SwarmState.of(records, view.absent)

    def false_among(self, view: SwarmState) -> frozenset[str]:
        """Those who handed over a false state, and those who are proven guilty: what they say of states is nothing.

        Where the former are half of all it is rather this peer that is wrong.
        """
        since = self._averager.clock.monotonic() - FALSE_SECONDS
        false = frozenset(r.peer_id for r in view.records if self._false.get(r.peer_id, -math.inf) >= since)
        guilty = self._averager.audits.proofs.guilty()
        return guilty | (false if 2 * len(false) < len(view.records) else frozenset())

    def catch_up(self, view: SwarmState, show: Callable[[str, str], None]) -> bool:
        """One attempt to come to the view's state; False when it failed, which is told. show: phase and reason."""
        began, before = self._averager.clock.monotonic(), int(self._averager.traffic[1])
        came = self._come_to(view, show)
        if came or int(self._averager.traffic[1]) > before:
            self._vain.clear()
        else:
            self._count_vain(view, began)
        return came

    def _count_vain(self, view: SwarmState, began: float) -> None:
        """An attempt brought nothing. While nobody votes, as when a swarm starts, one record is enough to lead all.

        So a few who name a state that nobody is given, and may all lie, do not count after a while; but for peers that
        the run file names, as a run must not begin anew because its auxiliary peer was not reached.
        """
        now, named = self._averager.clock.monotonic(), self._run.peers.named
        donors = [donor for donor in view.donors() if donor not in named]
        few = len(donors) <= liars_among(sum(record.averages for record in view.records))
        before = {donor: self._vain.get(donor, (began, 0)) for donor in donors}
        counts = few and not voters_among(view.records, view.absent)
        self._vain = {donor: (since, attempts + 1) for donor, (since, attempts) in before.items() if counts}
        for donor, (since, attempts) in self._vain.items():
            if attempts >= ATTEMPTS and now >= since + VAIN_ROUNDS * self._run.swarm.averaging_timeout:
                self._false[donor] = now
                self._emit(Log(f"{donor} says that it holds step {view.epoch}, and gives it to nobody", "warning"))

    def _come_to(self, view: SwarmState, show: Callable[[str, str], None]) -> bool:
        # who held another state before has no average for this one
        if self._state.epoch > 0 and 0 < view.epoch - self._state.epoch <= KEPT_AVERAGES:
            show("syncing", f"taking over the average of step {view.epoch}")
            if self.make_steps(view):
                return True
        show("syncing", f"taking over step {view.epoch}")
        least = min(self._state.epoch, view.epoch)  # a member that began anew may hand over what this peer left behind
        here = self._state.position  # who offers this has nothing of what its record names
        taken = self.take_state(lambda tree: tree.step >= least and (tree.step, tree.digest) != here)
        return taken or self._take_published(lambda step, digest: (step, digest) == (view.epoch, view.digest))

    def begin(self, view: SwarmState, show: Callable[[str, str], None]) -> bool:
        """As the first peer of a swarm: with the published checkpoint, if it is newer than what this peer holds."""
        if self._published is None or any(r.digest for r in view.records if r.peer_id != self._peer_id):
            return False
        show("syncing", "looking for a published checkpoint: nobody else is here")
        return self._take_published(lambda step, digest: step > self._state.epoch)

    def go_back(self, order: RollBack, view: SwarmState) -> bool:
        """One attempt to come to the state that the organiser ordered, or to what the others made of it since."""
        for loader in self._ways_back(order):
            if self._become(loader, lambda step, digest: (step, digest) == (order.step, order.digest)):
                return True
        return bool(view.donors()) and self.take_state()

    def make_steps(self, view: SwarmState, timeout: float = AVERAGE_SECONDS) -> bool:
        """Make the steps that the others made from this state to the view's, with their averages.

        False where one of those is not to be had, or they lead elsewhere. timeout: seconds for each.
        """
        started, before, giver = self._averager.clock.monotonic(), int(self._averager.traffic[1]), ""
        while self._state.epoch < view.epoch:
            if not (giver := self._fetch(view, self._state.position, timeout)) or not self._step():
                return False
        if self._state.position != (view.epoch, view.digest):
            self._false[giver] = self._averager.clock.monotonic()  # it, or this peer's own machine
            self._emit(Log(f"{giver} sent an average that does not lead to the others' state", "warning"))
            return False
        self._arrived(giver, started, int(self._averager.traffic[1]) - before)
        return True

    def follow(self, view: SwarmState, plan: RoundPlan) -> bool:
        """Make the step that some made from this state, whom too few followed for it to be the view's.

        Of the trainers of this plan, who are too few for a round, one who does not lie must have voted for its average.
        """
        epoch, key = self._state.epoch + 1, state_key(*self._state.position)
        ahead = [r.peer_id for r in view.records if r.averages and not r.client_mode and r.epoch == epoch]
        if not ahead or not self._averager.fetch_average(ahead, key, AVERAGE_SECONDS, plan):
            return False
        return self._step()

    def _step(self) -> bool:
        """Step with the average in the store; False where the organiser took the run back."""
        try:
            self._state.step(DecodedGradients(self._averager.store.buffer))
        except RolledBack as error:
            self._emit(Trouble("state", str(error), "taking over the others' state"))
            return False
        return True

    def _fetch(self, view: SwarmState, state: tuple[int, str], timeout: float) -> str:
        """Have the average with which the others stepped from `state` in the store. Returns who gave it, "": nobody.

        Of the view's voters one who does not lie must have precommitted it.
        """
        shares = voices(voters_among(view.records, view.absent))
        plan = RoundPlan(swarm=sum(shares.values()), voices=shares)
        givers, began = self._givers(view), self._averager.clock.monotonic()
        giver = self._averager.fetch_average(givers, state_key(*state), timeout, plan) or ""
        if not giver and givers and (now := self._averager.clock.monotonic()) >= began + timeout:
            self._slow[givers[0]] = now
        return giver

    def _givers(self, view: SwarmState) -> list[str]:
        """Those who may have averages that led to the view's state, in turns; assistants first, the slow last."""
        never = self.false_among(view) | {self._peer_id}
        made_it = {r.peer_id: r.role for r in view.records if r.averages and r.peer_id not in never}
        givers = [donor for donor in view.donors() if donor in made_it]
        turn = view.epoch % max(1, len(givers))
        turns, slow = givers[turn:] + givers[:turn], self._slow
        return sorted(turns, key=lambda giver: (slow.get(giver, -math.inf), made_it[giver] != "assistant"))

    def take_state(self, wanted: Callable[[Tree], bool] = lambda tree: True, *, replays: bool = True) -> bool:
        """Take the others' state, if it is wanted. replays: make the steps, too, that they make meanwhile."""
        started, view = self._averager.clock.monotonic(), self._look()
        self.ask_anew.clear()
        try:
            progress = DownloadProgress(self._emit, self.ask_anew, self._averager.clock.monotonic)
            replaying = StepReplay(self._run, self._averager, self._look, self._fetch) if replays else nullcontext()
            with replaying as replay:
                taken = self._averager.take_state(
                    self._state.tree(),
                    STATE_SECONDS,
                    progress,
                    at_once=self._at_once,
                    without=self.false_among(view),
                    absent=view.absent,
                )
                with taken.chunks:
                    if not wanted(taken.tree):
                        return False
                    self._state.patch(taken.tree, taken.chunks)
                    chunks, names = len(taken.chunks), taken.names()
                if replay is not None and (made := replay.replay(self._state)):
                    self._emit(Log(f"made {made} steps here that the others made meanwhile"))
            self._arrived(taken.donors[0], started, taken.received, chunks, names)
        except (NoState, ValueError) as error:
            if isinstance(error, NoState):
                self._false |= dict.fromkeys(error.refused, self._averager.clock.monotonic())
            failure = classify(error, "state")
            words = f"could not take over the others' state: {failure.words}"
            self._emit(Trouble(failure.what, words, failure.remedy))
            return False
        for donor, why in taken.refused.items():
            self._emit(Log(f"left out what {donor} sent: {why}", "warning"))
        for donor, why in taken.lost.items():
            self._emit(Trouble("state download", f"{donor} gave no more: {why}", "others gave the rest"))
        return True

    def _take_published(self, wanted: Callable[[int, str], bool]) -> bool:
        """Become the published state, if it is wanted: (step, digest) → whether it is."""
        if self._published is None or self._averager.clock.monotonic() < self._looked + HUB_SECONDS:
            return False
        self._looked = self._averager.clock.monotonic()
        return self._become(self._published, wanted)

    def _become(self, published: StateLoader, wanted: Callable[[int, str], bool]) -> bool:
        started = self._averager.clock.monotonic()
        try:
            tree, buffer, place = published()
            if not wanted(tree.step, tree.digest):
                self._emit(Log(f"{place} holds step {tree.step}: not what is needed"))
                return False
            with Chunks(tree, range(len(tree)), buffer) as chunks:
                self._state.patch(tree, chunks)
                self._arrived(place, started, sum(len(chunk) for chunk in chunks.values()), len(chunks))
        except (TTError, ValueError) as error:
            level = "warning" if self._state.epoch else "info"  # nothing may be published yet
            self._emit(Log(f"no published checkpoint was used: {error}", level))
            return False
        return True

    def _arrived(self, donor: str, started: float, received: int, chunks: int = 0, names: Sequence[str] = ()) -> None:
        seconds, (epoch, digest) = self._averager.clock.monotonic() - started, self._state.position
        self._emit(Synchronised(epoch, donor, digest, seconds, received, chunks=chunks, names=list(names)))


class DownloadProgress:
    """Emits how far a state has come, with the rate of the last seconds. Raises NoState when `give_up` is set."""

    def __init__(self, emit: Emit, give_up: threading.Event, clock: Callable[[], float]):
        self._emit, self._give_up = emit, give_up
        self._throughput = Throughput(clock, RATE_SECONDS)

    def __call__(self, received: int, total: int, donors: int) -> None:
        if self._give_up.is_set():
            raise NoState("nothing came for long: given up")
        if not total:
            return  # no donor has told yet how much there is
        self._throughput.add(received - self._throughput.total)
        rate = self._throughput.per_second()
        eta = (total - received) / rate if rate else None
        self._emit(Download(received, total, donors, bytes_per_second=rate, eta=eta))

"""Never stuck silently: a thread that says why no step is made, tries what may help, and says when it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tt_cli.peer.health.diagnosis import Diagnosis, PeerFacts, Remedy, Treatment, diagnose, seconds
from tt_cli.peer.health.restart_marker import may_restart
from tt_cli.run import RunConfig
from tt_cli.run.initial_peers import remember_met
from tt_cli.supervisor.events import Emit, Event, Failure, Log, Phase, Trouble
from tt_cli.supervisor.peer_state import KEPT_STEPS, PeerState
from tt_cli.supervisor.reporter import Orders, WorkerBroken
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.network.connectivity import Connectivity
from tt_cli.swarm.network.reachability import Astray
from tt_cli.swarm.records.peer_record import PeerRecord

LOOK_SECONDS = 1.0
ASK_SECONDS, CALM_SECONDS = 5.0, 120.0  # between two rounds of pings: when something is suspicious, when not
RESTART_SECONDS = 1800.0  # between two restarts
END_SECONDS = 30.0  # for the training thread to see that this process shall end
BACKUP_SECONDS = 60.0
SEEK_SECONDS, DOUBT_SECONDS = 300.0, 30.0  # between two times that others seek it, and before they do once more
LEAST_USUAL = 5.0  # seconds of a step
FIRST_BATCH = 60.0  # seconds of a micro-batch, before there was one

Item = TypeVar("Item")


class ObservedEmit:
    """An Emit that passes events on, and applies them to `state`, whose times are of a clock that nobody sets.

    Phases are not applied: what a stuck peer shows is not what it does. The watchdog asks for those.
    """

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic):
        self._emit, self._clock = emit, clock
        self.state = PeerState(run="", identity="")
        self.state.since = self.state.samples_grew_at = self.state.download_grew_at = clock()

    def __call__(self, event: Event, /) -> None:
        """Apply, pass on."""
        if not isinstance(event, Phase):
            self.state.apply(event, self._clock())
        self._emit(event)


def usual_step(state: PeerState) -> float:
    """Seconds that a step should take: as the newest ones, or as the swarm's speed promises."""
    rate, target = state.swarm_samples_per_second, state.target_samples
    if not (state.step_seconds or rate):
        return math.inf  # nobody knows yet
    newest = statistics.median(state.step_seconds) if state.step_seconds else 0.0
    return max(LEAST_USUAL, newest, target / rate if rate and target else 0.0)


class ProgressWatchdog:
    """A context manager: watches from its own thread, from before the first synchronisation to the end of training.

    marker: a file whose age tells when the peer was last restarted by this watch. save: writes a backup. seek: asks
    whether others look for this peer in vain.
    """

    def __init__(
        self,
        run: RunConfig,
        collaboration: Collaboration,
        observed: ObservedEmit,
        orders: Orders,
        marker: Path,
        save: Callable[[], None],
        seek: Callable[[], Astray | None] = lambda: None,
    ):
        self._seek, self._sought_at = seek, time.monotonic()
        self._doubt: Astray | None = None  # by the last answer
        self._astray: Astray | None = None  # by two in a row
        self._collaboration, self._observed, self._orders = collaboration, observed, orders
        self._marker, self._save, self._me = marker, save, collaboration.peer_id
        self._patience = run.swarm.matchmaking_time + run.swarm.averaging_timeout
        self._reading, self._batch_at, self._batches = False, 0.0, deque[float](maxlen=KEPT_STEPS)
        self._company: int | None = None  # the era in which others were seen
        self._lost, self._unmet_since = False, time.monotonic()
        self._contact: Connectivity | None = None
        self._met: list[str] = []  # who was remembered last
        self._asked_at = time.monotonic() - CALM_SECONDS + 20.0
        self._treatment = Treatment()
        self._broken = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stuck", daemon=True)

    def __enter__(self) -> ProgressWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    # ---------------------------------------------------------------- for the training loop

    def over(self, batches: Iterator[Item]) -> Iterator[Item]:
        """The same batches; how long each takes to be read and to be computed is noticed."""
        self._reading, self._batch_at = True, time.monotonic()
        for batch in batches:
            began = self._batch_at = time.monotonic()
            self._reading = False
            yield batch
            self._batches.append(time.monotonic() - began)
            self._reading, self._batch_at = True, time.monotonic()

    def check(self) -> None:
        """Raise WorkerBroken when nothing but a restart may help any more."""
        if self._broken:
            raise WorkerBroken(self._broken)

    # ---------------------------------------------------------------- in its thread

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if self._orders.leave.is_set():
                return
            facts = self._inquire()
            if self._ended.is_set():
                return
            self._treat(diagnose(facts))

    def _inquire(self) -> PeerFacts:
        """Ask the others what is due to be asked. Returns the facts after that."""
        facts, now = self._facts(), time.monotonic()
        asks = now > self._asked_at + (ASK_SECONDS if facts.suspicious else CALM_SECONDS)
        seeks = now > self._sought_at + (DOUBT_SECONDS if self._doubt else SEEK_SECONDS)
        if asks:
            self._ask()
        if seeks:
            found = None
            with contextlib.suppress(Exception):  # whatever is wrong with this peer's own processes the pings tell
                found = self._seek()
            self._astray, self._doubt = found if self._doubt else None, found
            self._sought_at = time.monotonic()
        return self._facts() if asks or seeks else facts

    def _facts(self) -> PeerFacts:
        state, collaboration, now = self._observed.state, self._collaboration, time.monotonic()
        view = collaboration.board.view
        trainers = [record for record in view.records if record.averages]
        state.enter((phase := collaboration.round_log.now).phase, phase.reason, now)
        others = [record for record in trainers if record.peer_id != collaboration.peer_id]
        self._count_others(others)
        self._unmet_since = math.inf if len(view.records) > 1 else self._unmet_since
        download = state.download
        trains = collaboration.about.role == "trainer"  # an assistant is often alone
        return PeerFacts(
            phase=state.state,
            since_phase=now - state.since,
            since_step=now - (state.since if state.began_step_at is None else state.began_step_at),
            usual_step=usual_step(state),
            patience=self._patience,
            samples=state.samples_seen,
            target=state.target_samples or 1,
            samples_per_second=state.swarm_samples_per_second or 0.0,
            since_growth=now - state.samples_grew_at,
            reading=self._reading,
            held=bool(self._orders.hold or self._collaboration.orders.paused),
            since_batch=now - self._batch_at if self._batch_at else 0.0,
            usual_batch=statistics.median(self._batches) if self._batches else FIRST_BATCH,
            since_read=now - collaboration.board.read_at,
            since_pulse=now - float(collaboration.averager.pulse[0]),
            download=(download.received, download.total, download.bytes_per_second) if download else None,
            since_bytes=now - state.download_grew_at,
            failed_rounds=state.failed_rounds,
            problem=state.last_round.removeprefix("round repeated: "),
            missing=tuple(collaboration.missing()),
            alone=not others and trains,
            lost_company=self._lost and trains,
            unmet=now - self._unmet_since if trains else 0.0,
            client_mode=collaboration.client_mode,
            listening=any(not record.client_mode for record in trainers),
            contact=self._contact,
            astray=self._astray,
        )

    def _count_others(self, others: Sequence[PeerRecord]) -> None:
        """Notice lost company: who says goodbye is gone at once, whose record expires counts for as long again.

        Who has not gone back yet, as the organiser ordered, is not lost.
        """
        board = self._collaboration.board
        if others:
            self._company, self._lost = others[0].era, False
        elif self._company is not None:
            self._lost = self._company == board.era and bool(board.trainers() - {self._me})
            self._company = None

    def _ask(self, anew: bool = False) -> None:
        view = self._collaboration.board.view
        listening = [record.peer_id for record in view.records if not (record.client_mode or record.left)]
        self._contact = self._collaboration.contacts.ask(listening, anew=anew)
        self._asked_at = time.monotonic()
        if (met := self._collaboration.contacts.met()) not in ([], self._met):
            self._met = met
            remember_met(self._marker.parent, met)
        self._lost = self._lost and not self._contact.cut_off  # that explains it

    def _treat(self, diagnosis: Diagnosis | None) -> None:
        before, began = self._treatment.cause, self._treatment.began
        remedy = self._treatment.next(diagnosis, time.monotonic())
        if before is not None and before.stuck and (diagnosis is None or not diagnosis.stuck):
            self._collaboration.round_log.stuck("")
            self._observed(Log(f"goes on after {seconds(time.monotonic() - began)}; it was: {before.words}"))
        if diagnosis is None or remedy is None:
            return
        if diagnosis.what == "slow":
            self._observed(Log(diagnosis.words))
            return
        if remedy == Remedy.RESTART and not may_restart(self._marker, RESTART_SECONDS, time.time()):
            remedy = Remedy.WAIT
        remedies = "; ".join(filter(None, (f"it {remedy}", diagnosis.advice)))
        self._observed(Trouble(diagnosis.what, diagnosis.words, remedies))
        if diagnosis.stuck:
            self._collaboration.round_log.stuck(diagnosis.words)
        match remedy:
            case Remedy.REJOIN:
                self._ask(anew=True)
                self._lost = self._lost and diagnosis.what != "alone"  # that is told, and tried
            case Remedy.REMATCH:
                self._collaboration.seek_anew.set()
            case Remedy.RESYNC:
                self._collaboration.take_over.ask_anew.set()
            case Remedy.RESTART:
                self._end(diagnosis.words)

    # ---------------------------------------------------------------- the last remedy

    def _end(self, words: str) -> None:
        """Have this process end, so that the supervisor starts it again from its backup."""
        self._broken = words
        if self._ended.wait(END_SECONDS) or self._orders.leave.is_set():
            return  # the training thread has seen it, or a person was faster
        saving = threading.Thread(target=self._save, daemon=True)  # what hangs may hold the state
        saving.start()
        saving.join(BACKUP_SECONDS)
        self._observed(Failure(words, WorkerBroken.exit_code))
        os._exit(WorkerBroken.exit_code)

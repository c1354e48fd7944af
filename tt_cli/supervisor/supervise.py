"""Keep one peer working: its worker process, Ctrl-C, restarts, pauses, limits, and what a person asks of it."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.control import Control
from tt_cli.supervisor.events import Event, Finished, Log, Phase, Snapshot, Step
from tt_cli.supervisor.household.limits import HouseholdLimits, Verdict, until_words
from tt_cli.supervisor.reporter import BUG_EXIT_CODE, WorkerBroken
from tt_cli.supervisor.worker_process import Worker

LEAVE_SECONDS = 25.0  # a state of gigabytes on a slow disk; who is in a hurry asks once more
PAUSE_SECONDS = 60.0  # to leave for a pause: nobody waits, and a large backup on a slow disk takes its time
LOOK_SECONDS = 0.5
MAX_FAILURES = 3
RETRY_SECONDS = (900.0, 3600.0, 14400.0)  # pauses after a peer that had worked has failed for good
RESTARTED = (BUG_EXIT_CODE, WorkerBroken.exit_code)


class EventSink(Protocol):
    """A screen, or anything else that takes a peer's events."""

    def show(self, event: Event) -> None: ...


class Failed(TTError):
    """The worker gave up; its message, its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class _Signal(KeyboardInterrupt):
    """A signal that means "leave", like Ctrl-C: SIGTERM when the machine shuts down, SIGHUP when a terminal closes."""

    def __str__(self) -> str:
        return str(self.args[0])


def supervise(
    start: Callable[[], Worker],
    screen: EventSink,
    control: Control | None = None,
    limits: HouseholdLimits | None = None,
) -> None:
    """Run a peer to its end, by one worker after the other.

    A crash (a killed process, a bug) starts a new worker, up to three times without a global step between. Ctrl-C lets
    it leave; a second one, or eight seconds, ends it. Raises Failed with one line when it cannot go on. With a
    `control`, a peer that has worked before is then paused instead and tries again later: nobody may be there to see.
    """
    supervision = _Supervision(start, screen, control, limits or HouseholdLimits())
    with _signals_raised():
        supervision.run()


class _Supervision:
    def __init__(
        self, start: Callable[[], Worker], screen: EventSink, control: Control | None, limits: HouseholdLimits
    ):
        self._start, self._screen, self._control, self._limits = start, screen, control, limits
        self._failures = self._retries = 0
        self._worked = False  # it has trained, or waited for its time: it may not vanish
        self._stepped = False  # this worker has
        self._gave_up: tuple[Verdict, Failed] | None = None
        self._pausing = self._leaving = False
        self._held = self._towards = ""
        self._asked_to_finish = self._unseen = False

    def run(self) -> None:
        try:
            self._limits.begin(self._show)
            while self._may_start() and self._run_worker():
                pass
        except KeyboardInterrupt as signalled:  # while no worker ran
            self._end(f"left: {_name(signalled)}", done=False)
        finally:
            self._limits.end()
        if self._gave_up is not None:
            raise self._gave_up[1]

    # ---------------------------------------------------------------- without a worker

    def _may_start(self) -> bool:
        """Wait until a worker may run. False when none is wanted any more."""
        while not self._finish:
            verdict = self._verdict()
            if verdict.action != "pause":
                return True
            self._worked = True
            self._pause_shown(verdict)
            if self._control is not None:
                self._control.news.wait(LOOK_SECONDS)
                self._control.news.clear()
            else:
                time.sleep(LOOK_SECONDS)
        self._end("finished, as asked with `tt finish`", done=True)
        return False

    def _verdict(self) -> Verdict:
        """Judge what the peer may do now, by a person's wish, by its failures, by its limits."""
        if self._control is not None:
            if self._control.take_resumed():
                self._gave_up, self._failures = None, 0
            asked = self._control.paused()
            if asked.action != "go on":
                return asked
        if self._gave_up is not None:
            verdict = self._gave_up[0]
            if verdict.until is None or time.time() < verdict.until:
                return verdict
            self._gave_up, self._failures = None, MAX_FAILURES - 1
        return self._limits.verdict()

    @property
    def _finish(self) -> bool:
        return self._control is not None and self._control.finish

    # ---------------------------------------------------------------- with one

    def _run_worker(self) -> bool:
        """From its start to its end. True when another one should follow, at once or after a pause."""
        if self._shown_pause is not None:  # the worker says so itself, after seconds
            self._show(Phase("starting", "after a pause"))
        worker = self._start()
        self._stepped = self._pausing = self._leaving = self._asked_to_finish = False
        self._held = self._towards = ""
        try:
            try:
                if self._follow(worker):
                    self._leave_to_pause(worker)
            except KeyboardInterrupt as signalled:
                self._leave(worker, signalled)
                return False
        finally:
            worker.kill()
        code = worker.wait()
        if self._pausing:
            return True
        if code == 0:
            self._ended(done=True)
            return False
        return self._after_failure(worker, code)

    def _follow(self, worker: Worker) -> bool:
        """Pass on what it tells and what is asked of it. True when a pause is due, False when it has ended."""
        while not worker.ended:
            for event in worker.events(timeout=LOOK_SECONDS):
                self._take(event)
                if self._steer(worker):
                    return True
            if self._steer(worker):
                return True
        return False

    def _steer(self, worker: Worker) -> bool:
        """Tell the worker what has changed. True when a pause is due."""
        verdict = self._verdict()
        if verdict.action == "pause":
            return True
        if self._finish != self._asked_to_finish:
            self._asked_to_finish = self._finish
            self._tell_finish(worker)
        hold = verdict.reason if verdict.action == "hold" else ""
        if bool(hold) != bool(self._held):
            self._held = hold
            worker.hold(hold)
            if self._towards:  # it trains; until then it starts, held or not
                self._show(Phase("waiting", hold) if hold else Phase("training", self._towards))
        return False

    def _tell_finish(self, worker: Worker) -> None:
        if not self._finish:
            worker.stay()
            self._show(Log("goes on after this step: `tt resume`"))
        elif self._control is not None and self._control.status.role == "aux":
            worker.leave()
        else:
            worker.finish()
            self._show(Log("ends after this step: `tt finish`"))

    def _take(self, event: Event) -> None:
        """One event of the worker's, as the whole peer tells it."""
        if isinstance(event, Step):
            self._stepped = True
            self._retries = 0
        if isinstance(event, Phase) and event.phase == "training":
            self._towards = event.reason
            if self._leaving:  # a round ended while the backup was written
                return
            if self._held:
                event = Phase("waiting", self._held, at=event.at)
        self._worked = self._worked or isinstance(event, (Step, Snapshot))
        if not (self._pausing and isinstance(event, Finished)):  # the worker has; the peer has not
            self._show(event)

    def _drain(self, worker: Worker, seconds: float) -> None:
        """Its last events, for at most so long."""
        deadline = time.monotonic() + seconds
        while not worker.ended and time.monotonic() < deadline:
            for event in worker.events(timeout=LOOK_SECONDS):
                self._take(event)
                if time.monotonic() > deadline:
                    break

    def _leave_to_pause(self, worker: Worker) -> None:
        self._pausing = self._leaving = True
        self._show(Phase("leaving", f"to pause {self._verdict().reason}".strip()))
        worker.leave()
        self._drain(worker, PAUSE_SECONDS)
        if worker.exit_code is None:
            self._show(Log(f"it did not leave within {PAUSE_SECONDS:.0f} s and was ended", "warning"))

    def _leave(self, worker: Worker, signalled: KeyboardInterrupt) -> None:
        self._pausing, self._leaving = False, True
        try:
            self._show(Phase("leaving", f"{_name(signalled)}; once more ends it at once"))
            worker.leave()
            self._drain(worker, LEAVE_SECONDS)
        except KeyboardInterrupt:
            self._end("ended at once", done=False)
            return
        if worker.exit_code is None:
            self._end(f"ended the hard way: it did not leave within {LEAVE_SECONDS:.0f} s", done=False)
        else:
            self._ended(done=False)

    def _after_failure(self, worker: Worker, code: int | None) -> bool:
        """Try again, give up for a while, or for good (Failed)."""
        failure = worker.failure
        final = failure is not None and failure.exit_code not in RESTARTED
        self._failures = 1 if self._stepped else self._failures + 1
        reason = _reason(worker, code)
        if not final and self._failures < MAX_FAILURES:
            counted = f"({self._failures} of {MAX_FAILURES - 1})"
            self._show(Log(f"{reason}; starting it again from its backup {counted}", "warning"))
            if self._control is not None:
                self._control.restarted()
            return True
        if final:
            assert failure is not None
            failed = Failed(failure.message, failure.exit_code)
        else:
            failed = Failed(f"{reason}; it failed {self._failures} times in a row: see {worker.log}", 1)
        if self._control is None or not self._worked or failed.exit_code == UsageError.exit_code:
            if self._control is not None:
                self._control.end(f"failed: {failed}", done=False)
            raise failed
        now = time.time()
        until = now + RETRY_SECONDS[min(self._retries, len(RETRY_SECONDS) - 1)]
        self._retries += 1
        again = f"tries again at {until_words(until, now).removeprefix('until ')}, `tt resume` tries now"
        self._gave_up = (Verdict("pause", f"{failed}; {again}", until), failed)
        return True

    # ---------------------------------------------------------------- for the screen

    def _pause_shown(self, verdict: Verdict) -> None:
        phase = Phase("paused", verdict.reason, verdict.until)
        if self._shown_pause != (phase.reason, phase.until):
            self._shown_pause = (phase.reason, phase.until)
            self._show(phase)

    _shown_pause: tuple[str, float | None] | None = None

    def _show(self, event: Event) -> None:
        if isinstance(event, Phase) and event.phase != "paused":
            self._shown_pause = None
        if self._control is not None:
            self._control.apply(event)
        try:
            if not self._unseen:
                self._screen.show(event)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._unseen = True  # the terminal has been closed; the worker shall leave cleanly all the same

    def _end(self, reason: str, *, done: bool) -> None:
        """The supervisor's own word for the end."""
        self._show(Finished(reason))
        self._ended(done=done)

    def _ended(self, *, done: bool) -> None:
        if self._control is not None:
            self._control.end(self._control.status.reason, done=done)


def _name(signalled: KeyboardInterrupt) -> str:
    return str(signalled) if isinstance(signalled, _Signal) else "Ctrl-C"


def _reason(worker: Worker, code: int | None) -> str:
    if worker.failure is not None:
        return worker.failure.message
    if code is not None and code < 0:
        return f"the peer process was killed (signal {-code})"
    return f"the peer process ended unexpectedly (exit code {code})"


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise like Ctrl-C, where they are not ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, frame: FrameType | None) -> None:
        raise _Signal(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, tell)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Keep one peer working: its worker process, Ctrl-C, restarts, pauses, limits, and what a person asks of it."""

from __future__ import annotations

import contextlib
import errno
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.control import Control
from tt_cli.supervisor.events import Card, Emit, Event, Failure, Finished, Log, Phase, Snapshot, Step
from tt_cli.supervisor.household.limits import Verdict, until_words
from tt_cli.supervisor.reporter import BUG_EXIT_CODE, WorkerBroken
from tt_cli.supervisor.side_process import STEADY_SECONDS
from tt_cli.supervisor.worker_process import NotStarted, Worker

LEAVE_SECONDS = 25.0  # a state of gigabytes on a slow disk; who is in a hurry asks once more
PAUSE_SECONDS = 60.0  # to leave for a pause: nobody waits, and a large backup on a slow disk takes its time
LOOK_SECONDS = 0.5
ASKED = "as asked with `tt finish`"
MAX_FAILURES = 3
RETRY_SECONDS = (900.0, 3600.0, 14400.0)  # pauses after a peer that had worked has failed for good
RESTARTED = (BUG_EXIT_CODE, WorkerBroken.exit_code)


class Failed(TTError):
    """The worker gave up; its message, its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def supervise(start: Callable[[], Worker], show: Emit, control: Control) -> None:
    """Run a peer to its end, by one worker after the other, within the limits of `control` and as a person asks.

    A crash (a killed process, a bug) starts a new worker, up to three times without a global step between, or a minute
    of an aux peer's work. Ctrl-C lets it leave; a second one, or LEAVE_SECONDS, ends it. A peer that has worked and
    cannot go on is paused and tried again later: nobody may be there to see. Raises Failed with one line where another
    has failed.
    show: gets all its events, on a screen or anywhere else.
    """
    _Supervision(start, show, control).run()


class _Supervision:
    def __init__(self, start: Callable[[], Worker], emit: Emit, control: Control):
        self._start, self._emit, self._control = start, emit, control
        self._failures = self._retries = 0
        self._worked = False  # it has trained, or waited for its time: it may not vanish
        self._gave_up: tuple[Verdict, Failed] | None = None
        self._unseen = self._unread = False

    def run(self) -> None:
        try:
            self._control.limits.begin(self._show)
            while self._may_start() and self._run_worker():
                pass
        except KeyboardInterrupt as signalled:  # while no worker ran
            self._end(f"left: {str(signalled) or 'Ctrl-C'}")
        finally:
            self._control.limits.end()
        if self._gave_up is not None:
            raise self._gave_up[1]

    # ---------------------------------------------------------------- without a worker

    def _may_start(self) -> bool:
        """Wait until a worker may run. False when none is wanted any more."""
        control, status = self._control, self._control.status
        while not status.finish:
            verdict = self._verdict()
            if verdict.action != "pause":
                return True
            self._worked = True
            if (status.state, status.reason, status.until) != ("paused", verdict.reason, verdict.until):
                self._show(Phase("paused", verdict.reason, verdict.until))
            control.news.wait(LOOK_SECONDS)
            control.news.clear()
        self._end(f"finished, {ASKED}", done=True)
        return False

    def _verdict(self) -> Verdict:
        """Judge what the peer may do now, by a person's wish, by its failures, by its limits."""
        if self._unread:
            raise KeyboardInterrupt("nobody reads what it prints")
        if self._control.resumed.is_set():
            self._control.resumed.clear()
            self._gave_up, self._failures = None, 0
        if (asked := self._control.paused()).action == "pause":
            return asked
        if self._gave_up is not None:
            verdict, _ = self._gave_up
            if time.time() < (verdict.until or 0.0):
                return verdict
            self._gave_up, self._failures = None, MAX_FAILURES - 1
        return self._control.limits.verdict

    # ---------------------------------------------------------------- with one

    def _run_worker(self) -> bool:
        """From its start to its end. True when another one should follow, at once or after a pause."""
        if self._control.status.state == "paused":  # the worker says so itself, after seconds
            self._show(Phase("starting", "after a pause"))
        try:
            worker = self._start()
        except NotStarted as error:
            return self._try_later(Failed(str(error), error.exit_code))
        self._began = time.monotonic()
        self._stepped = self._pausing = self._leaving = self._asked_to_finish = False
        self._held = self._towards = ""
        try:
            if self._follow(worker):
                self._pausing = True
                why = ASKED if self._control.status.finish else f"to pause {self._verdict().reason}".strip()
                if not self._left(worker, why, PAUSE_SECONDS):
                    self._show(Log(f"it did not leave within {PAUSE_SECONDS:.0f} s and was ended", "warning"))
        except KeyboardInterrupt as signalled:
            self._leave(worker, str(signalled) or "Ctrl-C")
            return False
        finally:
            worker.kill()
        code = worker.wait() or 0
        if self._pausing:
            return True
        if code == 0:
            self._control.end(done=True)
            return False
        return self._after_failure(worker, code)

    def _follow(self, worker: Worker, seconds: float = math.inf) -> bool:
        """Pass on what it tells, and to it what is asked, for so long. True when `_steer` says so."""
        deadline = time.monotonic() + seconds
        while not worker.ended and time.monotonic() < deadline:
            if (event := next(worker.events(timeout=LOOK_SECONDS), None)) is not None:
                self._take(event)
            if not self._leaving and self._steer(worker):
                return True
        return False

    def _steer(self, worker: Worker) -> bool:
        """Tell the worker what has changed. True when a pause is due, or an aux peer shall end."""
        verdict, status = self._verdict(), self._control.status
        if verdict.action == "pause" or (status.finish and status.role == "aux"):
            return True
        if status.finish != self._asked_to_finish:
            self._asked_to_finish = status.finish
            worker.finish(status.finish)
            words = "ends after this step: `tt finish`" if status.finish else "goes on after this step: `tt resume`"
            self._show(Log(words))
        hold = verdict.reason if verdict.action == "hold" else ""
        if bool(hold) != bool(self._held):
            self._held = hold
            worker.hold(hold)
            if self._towards:  # it trains; until then it starts, held or not
                self._show(Phase("waiting", hold) if hold else Phase("training", self._towards))
        return False

    def _take(self, event: Event) -> None:
        """One event of the worker's, as the whole peer tells it."""
        steady = time.monotonic() > self._began + STEADY_SECONDS
        if isinstance(event, Step) or (steady and isinstance(event, Snapshot)):  # an aux peer makes no steps
            self._stepped = True
            self._retries = 0
        if isinstance(event, Phase) and event.phase == "training":
            self._towards = event.reason
            if self._leaving:  # a round ended while the backup was written
                return
            if self._held:
                event = Phase("waiting", self._held, at=event.at)
        if isinstance(event, Card):
            self._control.limits.narrow(event.uuid)
        self._worked = self._worked or isinstance(event, (Step, Snapshot))
        if not (self._pausing and isinstance(event, Finished)):  # the worker has; the peer has not
            self._show(event)

    def _left(self, worker: Worker, why: str, seconds: float) -> bool:
        """Have it leave, and pass on its last events, for at most so long. False when that was not enough."""
        self._leaving = True
        self._show(Phase("leaving", why))
        worker.leave()
        self._follow(worker, seconds)
        return worker.exit_code is not None

    def _leave(self, worker: Worker, name: str) -> None:
        self._pausing = False
        try:
            if self._left(worker, f"{name}; once more ends it at once", LEAVE_SECONDS):
                self._control.end()
            else:
                self._end(f"ended the hard way: it did not leave within {LEAVE_SECONDS:.0f} s")
        except KeyboardInterrupt:
            self._end("ended at once")

    def _after_failure(self, worker: Worker, code: int) -> bool:
        """Try again, or give up for a while."""
        end = f"was killed (signal {-code})" if code < 0 else f"ended unexpectedly (exit code {code})"
        failure = worker.failure or Failure(f"the peer process {end}", BUG_EXIT_CODE)
        reason = failure.message
        self._failures = 1 if self._stepped else self._failures + 1
        if failure.exit_code not in RESTARTED:
            failed = Failed(reason, failure.exit_code)
        elif self._failures < MAX_FAILURES:
            counted = f"({self._failures} of {MAX_FAILURES - 1})"
            self._show(Log(f"{reason}; starting it again from its backup {counted}", "warning"))
            self._control.status.restarts += 1
            return True
        else:
            failed = Failed(f"{reason}; it failed {self._failures} times in a row: see {worker.log}", 1)
        return self._try_later(failed)

    def _try_later(self, failed: Failed) -> bool:
        """Pause after a failure for good. Raises it where another try is in vain, or somebody is there to see."""
        if not self._worked or failed.exit_code == UsageError.exit_code:
            raise failed
        now = time.time()
        until = now + RETRY_SECONDS[min(self._retries, len(RETRY_SECONDS) - 1)]
        self._retries += 1
        again = f"tries again at {until_words(until, now).removeprefix('until ')}, `tt resume` tries now"
        self._gave_up = (Verdict("pause", f"{failed}; {again}", until), failed)
        return True

    # ---------------------------------------------------------------- for the screen

    def _show(self, event: Event) -> None:
        self._control.apply(event)
        try:
            if not self._unseen:
                self._emit(event)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # The terminal has been closed, or `| tee` has ended: the worker shall leave cleanly all the same.
            self._unseen, self._unread = True, error.errno == errno.EPIPE

    def _end(self, reason: str, *, done: bool = False) -> None:
        """The supervisor's own word for the end."""
        self._show(Finished(reason))
        self._control.end(done=done)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Have signals that mean "leave" raise like Ctrl-C, where they are not ignored (nohup).

    SIGTERM comes when the machine shuts down, SIGHUP when a terminal closes.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    in_main = threading.current_thread() is threading.main_thread()  # no other thread may set them
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if in_main}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

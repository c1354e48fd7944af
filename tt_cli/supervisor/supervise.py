"""Keep one worker running: screen, Ctrl-C, restarts with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Event, Finished, Log, Phase, Step
from tt_cli.supervisor.process import Worker
from tt_cli.supervisor.worker import BUG_EXIT_CODE, WorkerBroken

LEAVE_SECONDS = 8.0
MAX_FAILURES = 3
RESTARTED = (BUG_EXIT_CODE, WorkerBroken.exit_code)


class Shows(Protocol):
    """A screen, or anything else that follows events."""

    def show(self, event: Event) -> None: ...


class Failed(TTError):
    """The worker gave up; its message, its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def supervise(start: Callable[[], Worker], screen: Shows) -> None:
    """Run a worker to its end.

    A crash (a killed process, a bug) restarts it, up to three times without a global step between. Ctrl-C lets it
    leave; a second one, or eight seconds, ends it. Raises Failed with one line when it cannot go on.
    """
    failures = 0
    while True:
        worker = start()
        stepped = False
        try:
            try:
                stepped = _follow(worker, screen, None)
            except KeyboardInterrupt:
                _leave(worker, screen)
                return
        finally:
            worker.kill()
        code = worker.wait()
        if code == 0:
            return
        if worker.failure is not None and worker.failure.exit_code not in RESTARTED:
            raise Failed(worker.failure.message, worker.failure.exit_code)
        failures = 1 if stepped else failures + 1
        reason = _reason(worker, code)
        if failures >= MAX_FAILURES:
            raise Failed(f"{reason}; it failed {failures} times in a row: see {worker.log}", 1)
        screen.show(Log(f"{reason}; starting it again from its backup ({failures} of {MAX_FAILURES - 1})", "warning"))


def _reason(worker: Worker, code: int | None) -> str:
    if worker.failure is not None:
        return worker.failure.message
    if code is not None and code < 0:
        return f"the peer process was killed (signal {-code})"
    return f"the peer process ended unexpectedly (exit code {code})"


def _follow(worker: Worker, screen: Shows, deadline: float | None) -> bool:
    stepped = False
    while not worker.ended and (deadline is None or time.monotonic() < deadline):
        for event in worker.events(timeout=0.5):
            screen.show(event)
            stepped = stepped or isinstance(event, Step)
            if deadline is not None and time.monotonic() > deadline:
                break
    return stepped


def _leave(worker: Worker, screen: Shows) -> None:
    try:
        screen.show(Phase("leaving", "Ctrl-C; once more ends it at once"))
        worker.leave()
        _follow(worker, screen, time.monotonic() + LEAVE_SECONDS)
    except KeyboardInterrupt:
        screen.show(Finished("ended at once"))
        return
    if worker.exit_code is None:
        screen.show(Finished(f"ended the hard way: it did not leave within {LEAVE_SECONDS:.0f} s"))

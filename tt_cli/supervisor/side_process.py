"""A part beside a peer, such as the authority or the web page: a process of its own, started again when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Emit, Failure, Log
from tt_cli.supervisor.worker_process import Worker

AGAIN_SECONDS = (1.0, 5.0, 30.0)
STEADY_SECONDS = 60.0  # after so long it counts as working, and the next end is a first one
LEAVE_SECONDS = 5.0


class SideProcess:
    """A context manager. name: begins what is told of it, as in "the authority ended".

    needed: entering waits until it works, or raises TTError that says why it does not; otherwise that is told, and it
    is tried again for as long as the part lives. Later ends are told and mended in both cases.
    """

    def __init__(self, name: str, start: Callable[[], Worker], show: Emit, *, needed: bool):
        self._name, self._start, self._show, self._needed = name, start, show, needed
        self._over, self._first = threading.Event(), threading.Event()
        self._failed: TTError | None = None
        self._worker: Worker | None = None
        self._told = ""
        # The kernel ends a worker when the thread that started it ends, so this one lives as long as the part.
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if self._needed:
            self._first.wait()
        if self._failed is not None:
            raise self._failed
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        self._thread.join(LEAVE_SECONDS)
        if self._worker is not None:
            self._worker.kill()

    def leave(self) -> None:
        """End for good, cleanly and soon; from any thread."""
        self._over.set()
        if self._worker is not None:
            self._worker.leave()

    def _keep(self) -> None:
        failures = 0
        while not self._over.is_set():
            started = time.monotonic()
            reason, code = self._run()
            failures = failures + 1 if time.monotonic() < started + STEADY_SECONDS else 1
            wait = AGAIN_SECONDS[min(failures, len(AGAIN_SECONDS)) - 1]
            if self._over.is_set():
                return
            if self._first.is_set():
                words = f"{self._name} ended ({reason}); starting it again in {wait:.0f} s"
            elif self._needed:  # the person who starts it is there to read why
                self._failed = TTError(f"{self._name} does not start: {reason}")
                self._failed.exit_code = code
                self._first.set()
                return
            else:
                wait = AGAIN_SECONDS[-1]
                words = f"{self._name} does not start: {reason}; the rest goes on, and it is tried again"
            if reason != self._told:
                self._told = reason
                self._show(Log(words, "error"))
            self._over.wait(wait)

    def _run(self) -> tuple[str, int]:
        """Follow one worker to its end. Returns why it ended, and with which exit code."""
        try:
            worker = self._worker = self._start()
        except TTError as error:
            return str(error), error.exit_code
        for event in worker.events():
            if not isinstance(event, Failure):
                self._first.set()
                self._told = ""
                self._show(event)
        code = worker.wait()
        return (worker.failure.message, worker.failure.exit_code) if worker.failure else (f"exit code {code}", 1)

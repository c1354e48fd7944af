"""A part beside a peer, such as the authority or the web page: a process of its own, started again when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Event, Failure, Log
from tt_cli.supervisor.worker_process import Worker

AGAIN_SECONDS = (1.0, 5.0, 30.0)
STEADY_SECONDS = 60.0  # after so long it counts as working, and the next end is a first one
LEAVE_SECONDS = 5.0


class SideProcess:
    """A context manager. name: begins what is told of it, as in "the authority ended".

    needed: entering waits until it works, or raises TTError that says why it does not; otherwise that is told, and it
    is tried again for as long as the part lives. Later ends are told and mended in both cases. module, options, log,
    environment: see Worker.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: dict[str, Any],
        log: Path,
        show: Callable[[Event], None],
        *,
        needed: bool,
        environment: dict[str, str] | None = None,
    ):
        self._name, self._module, self._options, self._log, self._show = name, module, options, log, show
        self._needed, self._environment = needed, environment
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
        if (worker := self._worker) is not None:
            worker.leave()

    def _keep(self) -> None:
        failures = 0
        while not self._over.is_set():
            try:
                worker = self._worker = Worker(self._module, self._options, self._log, self._environment)
            except TTError as error:
                if self._ended(str(error), error.exit_code):
                    return
                self._over.wait(AGAIN_SECONDS[-1])
                continue
            steady = threading.Timer(STEADY_SECONDS, lambda: None)
            steady.start()
            for event in worker.events():
                if isinstance(event, Failure):
                    continue
                self._first.set()
                self._told = ""
                self._show(event)
            code = worker.wait()
            failures = failures + 1 if steady.is_alive() else 1
            steady.cancel()
            if self._over.is_set():
                return
            reason = worker.failure.message if worker.failure else f"exit code {code}"
            if not self._first.is_set():
                if self._ended(reason, worker.failure.exit_code if worker.failure else 1):
                    return
                self._over.wait(AGAIN_SECONDS[-1])
                continue
            wait = AGAIN_SECONDS[min(failures, len(AGAIN_SECONDS)) - 1]
            if reason != self._told:
                self._told = reason
                self._show(Log(f"{self._name} ended ({reason}); starting it again in {wait:.0f} s", "error"))
            self._over.wait(wait)

    def _ended(self, reason: str, code: int) -> bool:
        """It never worked. Where it is needed the person who starts it is there to read why, and that is its end."""
        words = f"{self._name} does not start: {reason}"
        if self._needed:
            self._failed = TTError(words)
            self._failed.exit_code = code
            self._first.set()
        elif words != self._told:
            self._told = words
            self._show(Log(f"{words}; the rest goes on, and it is tried again", "error"))
        return self._needed

"""The peer's own backups: written beside training, read when it starts again."""

from __future__ import annotations

import threading
import time

from tt_cli.checkpoint import TrainingState, newest, save
from tt_cli.errors import TTError
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Log, Saved

BACKUP_SECONDS = 60.0


class Backups:
    """One writer thread at a time; a full disk is told, not fatal."""

    def __init__(self, run: RunConfig, emit: Emit):
        self._folder, self._emit = folders.checkpoints(run), emit
        self._identity = run.identity
        self._writer: threading.Thread | None = None
        self._written_at = time.monotonic()
        self._written_step = -1

    def newest(self) -> TrainingState | None:
        """The newest backup that can be read; damaged ones are set aside and told."""
        found = newest(self._folder, self._identity, lambda words: self._emit(Log(words, "warning")), to_train=True)
        if found is None:
            return None
        self._written_step = found[1].step
        return found[1]

    def due(self, step: int) -> bool:
        """True once a minute, when there is something new and the last one is written."""
        busy = self._writer is not None and self._writer.is_alive()
        return not busy and step > self._written_step and time.monotonic() > self._written_at + BACKUP_SECONDS

    def write(self, state: TrainingState, *, wait: bool = False) -> None:
        """Write `state` (which nobody else may change) in the background; `wait` for it when leaving."""
        if self._writer is not None:
            self._writer.join()
        if state.step <= self._written_step:
            return
        self._written_at = time.monotonic()
        self._writer = threading.Thread(target=self._write, args=(state,), name="backup")
        self._writer.start()
        if wait:
            self._writer.join()

    def _write(self, state: TrainingState) -> None:
        try:
            path = save(self._folder, state)
            self._written_step = state.step
            self._emit(Saved(state.step, str(path)))
        except TTError as error:
            self._emit(Log(f"no backup was written: {error}", "error"))

"""The peer's own backups: written beside training, read when it starts again.

Beside the state, which all members share, `own.json` keeps what is this peer's own: the seed of its examples' order.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

from tt_cli.checkpoint.checkpoint_files import newest, save, set_aside_after, write
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.errors import TTError
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Choice, Emit, Log, Saved

BACKUP_SECONDS = 60.0
MAX_SEED = 2**32


class Backups:
    """One writer thread at a time; a full disk is told, not fatal."""

    def __init__(self, run: RunConfig, emit: Emit):
        self._folder, self._emit = folders.checkpoints(run), emit
        self._identity = run.identity
        self._writer: threading.Thread | None = None
        self._written_at = time.monotonic()
        self._written_step = -1
        self._own: dict[str, Any] = {}

    def choose_seed(self, wanted: int | None) -> int:
        """The seed of the examples' order: `wanted`, else a new one. Told with its reason.

        A peer that returns with the `wanted` of the last time gets the next one in a fixed row: the order would begin
        anew, with the examples that it has seen most.
        """
        last = _read(self._folder / "own.json")
        if wanted is None:
            seed, returns, reason = random.SystemRandom().randrange(MAX_SEED), 0, "new at each start"
        elif last.get("wanted") == wanted:
            returns = last["returns"] + 1
            seed = random.Random(f"{wanted} {returns}").randrange(MAX_SEED)
            reason = f"follows from --seed {wanted}, return {returns}: not the same examples again"
        else:
            seed, returns, reason = wanted, 0, f"--seed {wanted}"
        self._own = {"data_seed": seed, "wanted": wanted, "returns": returns}
        self._emit(Choice("order of examples", f"seed {seed}", reason))
        return seed

    def newest(self) -> TrainingState | None:
        """The newest backup that can be read; damaged ones are set aside and told."""
        backup = newest(self._folder, self._identity, lambda words: self._emit(Log(words, "warning")), to_train=True)
        if backup is None:
            return None
        self._written_step = backup[1].step
        return backup[1]

    def go_back(self, order: RollBack) -> None:
        """Later steps are no longer the run's: set their backups aside. Raises TTError."""
        if self._writer is not None:
            self._writer.join()
        why = f"the organiser took the run back to step {order.step}"
        for path in set_aside_after(self._folder, order.step, f"before-order-{order.order}"):
            self._emit(Log(f"set aside as {path.name}: {why}", "warning"))
        self._written_step = min(self._written_step, order.step)

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
            write(self._folder / "own.json", [json.dumps({"step": state.step, **self._own}).encode()])
            self._written_step = state.step
            self._emit(Saved(state.step, str(path)))
        except TTError as error:
            self._emit(Log(f"no backup was written: {error}", "error"))


def _read(path: Path) -> dict[str, Any]:
    """Read what an earlier start wrote; nothing where that is missing or damaged, for it is no great loss."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    fits = isinstance(content, dict) and isinstance(content.get("returns"), int)
    return content if fits else {}

"""Records what the swarm did: one line of JSON for each step, and the history that others read from the DHT."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tt_cli.errors import TTError
from tt_cli.swarm.board import View
from tt_cli.swarm.records import HistoryRecord

HISTORY_STEPS = 256


class Recorder:
    """Appends to `steps.jsonl` in the run's folder; survives a kill at any instant (a torn last line is dropped).

    A line: {"step", "loss", "time" (Unix seconds), "peers", "samples_per_second", "users"}.
    """

    def __init__(self, folder: Path):
        self.path = folder / "steps.jsonl"
        self._steps: list[tuple[int, float, float]] = self._read()

    def _read(self) -> list[tuple[int, float, float]]:
        steps = []
        if self.path.exists():
            try:
                whole, newline, torn = self.path.read_bytes().rpartition(b"\n")
                if torn:
                    os.truncate(self.path, len(whole + newline))
            except OSError as error:
                raise TTError(f"cannot read {self.path}: {error.strerror}: move it away or set TT_HOME") from error
            for line in whole.decode("utf-8", "replace").splitlines():
                try:
                    row = json.loads(line)
                    step = (int(row["step"]), float(row["loss"]), float(row["time"]))
                    steps += HistoryRecord(steps=[step]).steps
                except (ValueError, KeyError, TypeError, OverflowError):
                    continue  # damaged on the disk; one line must not stop the others
        return steps

    @property
    def step(self) -> int:
        """The last step recorded, 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    def record(self, view: View) -> bool:
        """Record the swarm's step if it is new and its loss is known. Raises TTError when it cannot be written."""
        at_step = [r for r in view.records if r.role == "trainer" and r.epoch == view.epoch and r.loss is not None]
        if view.epoch <= self.step or not at_step:
            return False
        weights = [max(record.samples_per_second, 1e-9) for record in at_step]
        loss = sum(w * (r.loss or 0.0) for w, r in zip(weights, at_step, strict=True)) / sum(weights)
        now = time.time()
        row = {
            "step": view.epoch,
            "loss": loss,
            "time": now,
            "peers": len(at_step),
            "samples_per_second": view.samples_per_second(),
            "users": sorted({record.user or record.peer_id for record in at_step}),
        }
        try:
            self._append(json.dumps(row) + "\n")
        except OSError as error:
            raise TTError(f"cannot record step {view.epoch} in {self.path}: {error.strerror}") from error
        self._steps.append((view.epoch, loss, now))
        return True

    def _append(self, line: str) -> None:
        """All of `line` or nothing of it: half a line would spoil the next one."""
        with self.path.open("ab", buffering=0) as file:
            before, data = file.tell(), line.encode()
            try:
                while data:  # a disk that is almost full takes a part, and refuses the rest with its reason
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise

    def history(self) -> HistoryRecord:
        """The recorded steps, thinned evenly to at most 256; the last one is always among them."""
        steps = self._steps
        if len(steps) > HISTORY_STEPS:
            scale = (len(steps) - 1) / (HISTORY_STEPS - 1)
            steps = [steps[round(index * scale)] for index in range(HISTORY_STEPS)]
        return HistoryRecord(steps=steps)

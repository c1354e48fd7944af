"""Evaluation of checkpoints along training: their held-out loss, and pictures or texts that can be compared.

Notable:
- it reads the run's folder and never asks the swarm; of several checkpoints that are new it takes the newest;
- the row that says that a checkpoint is done is the last thing written. What was killed midway is done again, to the
  same bytes under the same names; what is done is never done twice;
- a text is kept as a picture is: a file in the same folder, a row in the same table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tt_cli.atomic_write import atomic_write
from tt_cli.checkpoint.checkpoint_files import checkpoints_in, load, step_of
from tt_cli.checkpoint.training_state import CheckpointError
from tt_cli.data.examples import Batch
from tt_cli.data.stream.subset import HELD_OUT
from tt_cli.errors import TTError, os_errors
from tt_cli.history.reader import HistoryReader, Row
from tt_cli.history.writer import PICTURES, HistoryWriter
from tt_cli.run import RunConfig, folders
from tt_cli.task import task_of
from tt_cli.task.task import Task
from tt_cli.terminal.format import plural

MOST_EXAMPLES = 512  # for the held-out loss
BATCH = 16
LEADER_SECONDS = 1800.0  # for another auxiliary peer to evaluate what is due
KEPT_STEPS = 200  # whose pictures are kept
_OWN = re.compile(r"\d{8,15}-[0-9a-f]{8}-\d+\.(png|txt)|\..+\.(png|txt)\.tmp")  # its files, finished or not


class Evaluator:
    """Evaluates the checkpoints of one run. every: global steps between two evaluations.

    tell takes a line for a person and its level, heartbeat what it does at the moment. activity: what it did last.
    """

    def __init__(
        self,
        run: RunConfig,
        store: HistoryWriter,
        reader: HistoryReader,
        every: int,
        prompts: list[str],
        tell: Callable[[str, str], None],
        heartbeat: Callable[[str], None],
    ):
        self._run, self._store, self._reader, self._every, self._prompts = run, store, reader, every, prompts
        self._tell, self._heartbeat = tell, heartbeat
        self._checkpoints, self._pictures = folders.checkpoints(run), folders.run_folder(run) / PICTURES
        self._seen: tuple[Path, int] | None = None
        self._last: int | None = None  # step that this process evaluated
        self._due_since: float | None = None  # while another one leads
        self.activity = "waits for the first checkpoint"

    @cached_property
    def _heldout(self) -> list[Batch]:
        batches = self._task.held_out(MOST_EXAMPLES, BATCH)
        if not batches:
            splits = f"{', '.join(HELD_OUT[:-1])} or {HELD_OUT[-1]}"
            rest = "samples only" if self._run.prompts else "nothing is measured"
            self._tell(f"the data set {self._run.data.name} has no split {splits}: {rest}", "info")
        return batches

    @cached_property
    def _task(self) -> Task[Any]:
        task = task_of(self._run)
        task.prepare()
        return task

    def stands_by(self) -> bool:
        """True while another one that leads has had no time to do what is due. Nothing is loaded for that."""
        done = [row["step"] for row in self._reader.checkpoints() if row["heldout_loss"] is not None or row["pictures"]]
        newest, last = next(map(step_of, checkpoints_in(self._checkpoints)), None), max(done, default=-self._every)
        if newest is None or newest < last + self._every:
            self._due_since = None
            return True
        self._due_since = self._due_since or time.monotonic()
        return time.monotonic() < self._due_since + LEADER_SECONDS

    def look(self) -> bool:
        """Evaluate the newest checkpoint where that is due; whether it did.

        Raises TTError for what may be better later: no database, no room on the disk, no Hub for the tokenizer.
        """
        try:
            path = next(iter(checkpoints_in(self._checkpoints)))
            file = path.stat()
        except (StopIteration, FileNotFoundError):  # none yet, or removed at this moment for a newer one
            return False
        if (path, file.st_mtime_ns) == self._seen:
            return False
        evaluated = False
        try:
            if self._due(step_of(path)) and (evaluated := self._evaluate(path, file.st_mtime, file.st_size)):
                self._last = step_of(path)
        except CheckpointError as error:
            self._tell(f"{error}; passed over", "warning")
        self._seen = path, file.st_mtime_ns
        return evaluated

    def _due(self, step: int) -> bool:
        done = [row["step"] for row in self._reader.checkpoints() if self._done(row)]
        if self._last is not None and self._last <= step:  # one of which there was nothing to tell
            done.append(self._last)
        last, ends = max(done, default=None), step >= self._run.schedule.total_steps
        return last is None or step >= last + self._every or (ends and step > last)

    def _done(self, row: Row) -> bool:
        if self._heldout:
            return row["heldout_loss"] is not None
        return bool(row["pictures"]) or not self._run.prompts  # there is nothing but the row

    def _evaluate(self, path: Path, at: float, size: int) -> bool:
        """Raises CheckpointError for one that cannot be used, or is gone."""
        task, step = self._task, step_of(path)
        self._heartbeat(f"evaluates step {step}")
        state = load(path)
        if (state.identity, state.step) != (self._run.identity, step):
            raise CheckpointError(f"{path} is of step {state.step} of the run {state.identity}")
        digest, parameters = state.digest(), state.parameters
        del state  # the optimizer's part is not needed
        model = task.filled_model(parameters, str(path)).eval().requires_grad_(False)
        loss = self._heldout_loss(model)
        samples = self._samples(model, step)
        if not any(step_of(other) >= step for other in checkpoints_in(self._checkpoints)):
            return False  # an organiser's order took the run back meanwhile
        files = self._save(samples.values(), step, digest, "png" if task.draws else "txt")
        self._store.add_pictures(step, zip(samples, files, strict=True))
        self._store.add_checkpoint(step, at, digest, size, heldout_loss=loss)
        self._tidy()
        results = [] if loss is None else [f"held-out loss {loss:.4f}"]
        if loss is not None and self._run.kind == "causal_lm":
            results[0] += f" (perplexity {torch.tensor(loss).exp():.2f})"  # inf of what has diverged
        results += [plural(len(files), "picture" if task.draws else "text")] if files else []
        wanted = "measure and to draw" if self._run.prompts else "measure"
        self.activity = f"step {step}: {', '.join(results) or f'nothing to {wanted} with'}"
        self._tell(self.activity, "info")
        return True

    def _heldout_loss(self, model: nn.Module) -> float | None:
        """Mean of the task's loss over the examples in nats, in float32; None without examples."""
        with torch.no_grad():
            losses = [self._task.losses(model, batch)[0].item() * len(batch) for batch in self._heldout]
        return sum(losses) / sum(map(len, self._heldout)) if losses else None

    def _samples(self, model: Any, step: int) -> dict[str, bytes]:
        """Samples by their prompts; none without the VQGAN's weights, or the memory."""
        try:
            return self._task.samples(model, self._prompts, step, self._tell, self._heartbeat)
        except TTError as error:
            self._tell(f"no samples are made: {error}", "warning")
            return {}

    def _save(self, samples: Iterable[bytes], step: int, digest: str, suffix: str) -> list[str]:
        """The names of the files, which are there whole or not at all."""
        files = []
        with os_errors(f"cannot write samples to {self._pictures}"):
            self._pictures.mkdir(exist_ok=True)
            for number, sample in enumerate(samples):
                # With the digest: after an order to go back a step is made again, and browsers keep pictures by name.
                files.append(f"{step:08d}-{digest[:8]}-{number}.{suffix}")
                atomic_write(self._pictures / files[-1], sample)
        return files

    def _tidy(self) -> None:
        """Keep the pictures of so many steps, and no file that no row names."""
        rows = [row for row in self._reader.checkpoints() if row["pictures"]]
        kept = spread((row["step"] for row in rows), KEPT_STEPS)
        self._store.drop_pictures({row["step"] for row in rows} - set(kept))
        named = {picture["file"] for row in rows if row["step"] in kept for picture in row["pictures"]}
        for file in self._pictures.glob("*"):
            if _OWN.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)


def spread(steps: Iterable[int], most: int) -> list[int]:
    """At most `most` of these steps, first and last among them, with gaps as even as can be; old ones grow first."""
    kept = sorted(steps)
    while len(kept) > max(most, 2):
        del kept[min(range(1, len(kept) - 1), key=lambda place: kept[place + 1] - kept[place - 1])]
    return kept

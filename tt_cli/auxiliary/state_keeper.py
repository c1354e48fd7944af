"""Keeper of the swarm's latest state: in memory, on the disk as checkpoints, for those who ask."""

from __future__ import annotations

from tt_cli.checkpoint.checkpoint_files import find, newest, save, set_aside_after, set_aside_other
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.errors import TTError
from tt_cli.identity.passes import RollBack
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig, folders
from tt_cli.run.checkpoint_names import name_of
from tt_cli.supervisor.events import Emit, Log, Saved
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.swarm.shared_state import LockedState
from tt_cli.swarm.state.bridge import Chunks, StateBuffer
from tt_cli.task import task_of

KEPT = 5  # the newest checkpoints; older ones too, ever fewer the older they are


class StateKeeper:
    """The state of one run, in memory and on the disk; it is copied for those who take it.

    state: whoever changes it calls `accept` when members signed what it has become; until then none is held. trained:
    what it is made of. saved_at: Unix time of the checkpoint that it last began with, 0 without one. hand_over may be
    called from any thread; accept, save and go_back while nothing else changes the state.
    """

    saved_at = 0.0
    _sure = 0  # the step of the last state that it had written and that two voters held
    _trouble = ""  # with the last checkpoint, which is told once

    def __init__(self, run: RunConfig, emit: Emit):
        self._run, self._emit = run, emit
        self._folder = folders.checkpoints(run)
        task, checkpoint = task_of(run), self._newest()
        model = task.new_model() if checkpoint is None else task.unfilled_model()
        self.trained = TrainedState(run, model, checkpoint, self._newest)
        self.state = LockedState(self.trained)
        self._accepted = (0, "")
        if checkpoint is not None:
            self.accept()
            self._sure = self.epoch
            emit(Log(f"holding step {self.epoch} from {self._folder}"))
        del model, checkpoint
        release_freed_memory()

    @property
    def position(self) -> tuple[int, str]:
        """Epoch and digest of the state held, (0, "") without one."""
        return self._accepted if self._accepted == self.state.position else (0, "")

    @property
    def epoch(self) -> int:
        """Global steps of the state held, 0 without one."""
        return self.position[0]

    @property
    def accepted(self) -> tuple[int, str]:
        """Epoch and digest of the last state that was held, if none is now, (0, "") before the first."""
        return self._accepted

    def accept(self) -> None:
        """Hold what the state has become."""
        self._accepted = self.state.position

    def save(self, sure: bool = False) -> None:
        """Write a checkpoint. A full disk is told. sure: two voters hold it; the last such one is kept."""
        (step, digest), before, self._trouble = self.position, self._trouble, ""
        self._sure = step if sure else self._sure
        try:
            if aside := set_aside_other(self._folder / name_of(step), digest):
                self._emit(Log(f"set aside as {aside.name}: another state of step {step} is held", "warning"))
            state = self.trained.state()
            self._emit(Saved(step, str(save(self._folder, state, keep=KEPT, spread=True, spare=(self._sure,)))))
        except TTError as error:
            self._trouble = str(error)
            if self._trouble != before:
                self._emit(Log(f"the state is kept in memory only: {error}", "error"))

    def go_back(self, order: RollBack) -> None:
        """Hold the state that the organiser ordered if a checkpoint of it is here, else none. Later ones do not count.

        Raises TTError when they cannot be set aside.
        """
        for path in set_aside_after(self._folder, order.step, f"before-order-{order.order}"):
            self._emit(Log(f"set aside as {path.name}: the organiser took the run back to step {order.step}"))
        if self.position == (order.step, order.digest):
            return
        self._accepted = (0, "")
        if checkpoint := find(self._folder, self._run.identity, order.step, order.digest):
            tree, buffer = checkpoint[1].tree(), StateBuffer.new()
            checkpoint[1].write_into(tree, buffer.write)
            with Chunks(tree, range(len(tree)), buffer) as chunks:
                self.state.patch(tree, chunks)
            self.accept()
            self.saved_at = checkpoint[0].stat().st_mtime
            self._emit(Log(f"holding step {self.epoch} from {checkpoint[0]}"))

    def hand_over(self) -> tuple[bytes, StateBuffer] | None:
        """A copy for a peer that asks for the state: (manifest, buffer); None where none is held."""
        return self.state.snapshot() if self.position[1] else None

    def _newest(self) -> TrainingState | None:
        """The newest state on the disk; damaged ones are set aside and told."""
        found = newest(self._folder, self._run.identity, lambda words: self._emit(Log(words, "warning")), to_train=True)
        if found is None:
            return None
        self.saved_at = found[0].stat().st_mtime
        return found[1]

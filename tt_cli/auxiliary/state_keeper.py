"""Keeper of the swarm's latest state: takes it from a trainer by verified chunks, writes it, hands it out."""

from __future__ import annotations

import time
from pathlib import Path

from tt_cli.checkpoint.checkpoint_files import find, newest, save, set_aside_after
from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.errors import TTError
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Log, Saved, Synchronised
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.state.bridge import NoState, ReceivedState, StateBridge, StateBuffer
from tt_cli.task import task_of

MIN_FETCH_SECONDS = 3.0
SHARE_OF_TIME = 0.1  # of the auxiliary peer's time goes into fetching at most
BYTES_A_SECOND = 1e6  # that it takes of the trainers' upload, in the mean, at most
DOWNLOAD_SECONDS = 180.0  # without a chunk
KEPT = 5  # the newest checkpoints; older ones too, ever fewer the older they are


class StateKeeper:
    """The state of one run, in memory once, for the takers too, and on the disk as checkpoints.

    hand_over and read_tree are called from other threads, and read_tree in the averager's process; fetch from a thread
    of its own, while nothing else changes what is held; everything else from the coordinator's loop.
    """

    def __init__(self, run: RunConfig, emit: Emit):
        self._run, self._emit = run, emit
        self._folder = folders.checkpoints(run)
        self._shapes = task_of(run).shapes()
        self._held: tuple[StateTree, StateBuffer] | None = None
        self._fetch_again_at = 0.0
        checkpoint = newest(self._folder, run.identity, lambda words: emit(Log(words, "warning")), to_train=True)
        if checkpoint is not None:
            self._hold(*checkpoint)

    @property
    def epoch(self) -> int:
        """Global steps of the state held, 0 without one."""
        return self._held[0].step if self._held else 0

    @property
    def digest(self) -> str:
        """Digest of the state held, empty without one."""
        return self._held[0].digest if self._held else ""

    def _hold(self, path: Path, state: TrainingState) -> None:
        tree, buffer = state.tree(), StateBuffer.new()
        state.write_into(tree, buffer.write)
        self._held = tree, buffer
        self._emit(Log(f"holding step {self.epoch} from {path}"))

    def go_back(self, order: RollBack) -> None:
        """Hold the state that the organiser ordered if a checkpoint of it is here, else none. Later ones do not count.

        Raises TTError when they cannot be set aside.
        """
        for path in set_aside_after(self._folder, order.step, f"before-order-{order.order}"):
            self._emit(Log(f"set aside as {path.name}: the organiser took the run back to step {order.step}"))
        self._held, self._fetch_again_at = None, 0.0
        if checkpoint := find(self._folder, self._run.identity, order.step, order.digest):
            self._hold(*checkpoint)

    def hand_over(self) -> tuple[bytes, StateBuffer] | None:
        """For a peer that asks for the state: it reads the very memory that is held here."""
        held = self._held
        return None if held is None else (held[0].manifest(), held[1])

    def read_tree(self, manifest: bytes) -> StateTree:
        """The tree of a state of this run. Raises ValueError."""
        return StateTree.parse(manifest, self._run.identity, self._shapes)

    def wants(self, view: SwarmState) -> bool:
        """True when trainers hold a state this peer should fetch now."""
        new = (view.epoch, view.digest) != (self.epoch, self.digest) and view.epoch >= self.epoch
        last = view.epoch >= self._run.schedule.total_steps
        return bool(view.digest) and new and (last or time.monotonic() >= self._fetch_again_at)

    def fetch(self, averager: StateBridge) -> None:
        """Take the state that most of the foremost hold; on failure say why and keep the one before."""
        started = time.monotonic()
        received = 0
        try:
            # from one at a time: it takes often, and every donor makes a copy of its state
            taken = averager.take_state(self._held[0] if self._held else None, DOWNLOAD_SECONDS, at_once=1)
            received = taken.received
            self._take(taken, started)
        except (NoState, TTError, ValueError) as error:
            self._emit(Log(f"the swarm's state was not taken: {error}", "warning"))
        seconds = time.monotonic() - started
        self._fetch_again_at = time.monotonic() + max(
            MIN_FETCH_SECONDS, seconds / SHARE_OF_TIME, received / BYTES_A_SECOND
        )

    def _take(self, taken: ReceivedState, started: float) -> None:
        tree, chunks = taken.tree, taken.chunks
        for index in range(len(tree)):
            if index not in chunks and self._held is not None:  # alike in both: not sent
                chunks.buffer.write(tree.place(index)[0], self._held[1].read(*tree.place(index)))
        state = received_state(tree, chunks.whole(), self._run.to_toml())
        self._held = tree, chunks.buffer
        seconds, donor = time.monotonic() - started, taken.donors[0]
        names, count = taken.names(), len(chunks)
        self._emit(Synchronised(tree.step, donor, tree.digest, seconds, taken.received, chunks=count, names=names))
        try:
            self._emit(Saved(state.step, str(save(self._folder, state, keep=KEPT, spread=True))))
        except TTError as error:
            self._emit(Log(f"the state is kept in memory only: {error}", "error"))

"""The shared state between two threads: the one that steps it and the one that trains on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import SharedState, StepFacts, Tree
from tt_cli.swarm.state.bridge import ReceivedState


class LockedState:
    """`SharedState` behind a lock. epoch and digest can be read without waiting for a step under way.

    fresh: the state is newer than what `use` last showed. resynced: chunks that had to be taken again because they
    differed from the others' at the same step.
    """

    def __init__(self, shared: SharedState):
        self._shared = shared
        self._lock = threading.Lock()
        self.position = (shared.epoch, shared.digest)
        self.fresh = False
        self.resynced = 0

    @property
    def epoch(self) -> int:
        """Global steps that the state has seen."""
        return self.position[0]

    @property
    def digest(self) -> str:
        """Of the state, by which members are matched."""
        return self.position[1]

    @property
    def key(self) -> str:
        """Names the state; rounds that start from it carry this key."""
        return state_key(*self.position)

    @contextmanager
    def use(self) -> Iterator[SharedState]:
        """A context in which the state does not change."""
        with self._lock:
            yield self._shared
            self.fresh = False

    def tree(self) -> Tree:
        """The hashes of all chunks."""
        with self._lock:
            return self._shared.tree

    def snapshot(self) -> tuple[bytes, StateBuffer]:
        """A copy for another peer: (manifest, buffer)."""
        buffer = StateBuffer.new()
        with self._lock:
            tree = self._shared.write_into(buffer.write)
        return tree.manifest(), buffer

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        """One step with the whole average. Nothing else steps the state. RolledBack: it is an earlier one then."""
        with self._lock:
            try:
                return self._shared.step(gradients)
            finally:
                self._changed()

    def patch(self, taken: ReceivedState) -> None:
        """Become the state whose chunks were taken. Raises ValueError, with nothing changed, where they do not fit."""
        with self._lock:
            same_step = taken.tree.step == self._shared.epoch
            self._shared.patch(taken.tree, taken.chunks)
            self._changed()
        if same_step and self.epoch:
            self.resynced += len(taken.chunks)

    def _changed(self) -> None:
        self.position = (self._shared.epoch, self._shared.digest)
        self.fresh = True


def state_key(epoch: int, digest: str) -> str:
    """Short enough for a DHT key, long enough to tell states apart."""
    return f"{epoch}_{digest[:16]}"

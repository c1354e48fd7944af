"""The state that all members hold alike, as the swarm needs it, and its lock.

The peer implements `SharedState` from model, optimizer and files. `LockedState` is for two threads: the one that steps
it and the one that trains on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tt_cli.swarm.shared_memory import StateBuffer

StateLoader = Callable[[], tuple[Any, StateBuffer, str]]
"""Loads a state that was published: its tree, its bytes, where it lies. Raises TTError."""


@dataclass(frozen=True)
class StepFacts:
    """learning_rate and gradient_norm (before clipping) of one global step."""

    learning_rate: float
    gradient_norm: float


class RolledBack(Exception):
    """A step met numbers in the state itself that are not finite; the state is an earlier one now. One line: why."""


class Tree(Protocol):
    """The hash tree over the chunks of one state, as `checkpoint.hash_tree.StateTree` has it and describes it."""

    @property
    def step(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def differing(self, other: Any) -> list[int]: ...
    def holds(self, index: int, data: bytes | memoryview) -> bool: ...
    def name_of(self, index: int) -> str: ...
    def place(self, index: int) -> tuple[int, int]: ...
    def manifest(self) -> bytes: ...


TreeReader = Callable[[bytes], Any]
"""Manifest → Tree. Raises ValueError for what is no tree of a state of this run."""


class SharedState(Protocol):
    """Parameters, optimizer state and the count of steps. Equal on all members, to the last bit.

    Called by one thread at a time; `Collaboration` sees to it. `read_tree` alone is called by others, and in the
    averager's process.
    """

    @property
    def epoch(self) -> int:
        """Global steps that these parameters have seen."""

    @property
    def digest(self) -> str:
        """Hex digest of all of it: equal digests mean equal bytes."""

    @property
    def tree(self) -> Any:
        """The hash tree (`Tree`) of the present state, whose root is the digest."""

    def shapes(self) -> dict[str, torch.Size]:
        """Name → shape of every gradient, in the order in which gradients travel."""

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        """Apply one averaged gradient (fp32, CPU, finite). Afterwards `epoch` is one more. Raises RolledBack."""

    def read_tree(self, manifest: bytes) -> Any:
        """The tree (`Tree`) that another peer sent, of a state that could be this one. Raises ValueError."""

    def write_into(self, write: Callable[[int, memoryview], object]) -> Any:
        """Copy all of it with `write(offset, bytes)`, each chunk at its place. Returns the tree of what was written."""

    def patch(self, tree: Any, chunks: Mapping[int, memoryview]) -> None:
        """Become the state of `tree`, which `read_tree` read and members signed, by taking `chunks`: all that differ.

        Raises ValueError, with nothing changed, when a chunk is missing or wrong, or holds what no state may hold.
        """


class LockedState:
    """`SharedState` behind a lock. epoch and digest can be read without waiting for a step under way.

    fresh: the state is newer than what the model has; who copies it there says so. resynced: chunks that had to be
    taken again because they differed from the others' at the same step.
    """

    def __init__(self, shared: SharedState):
        self._shared = shared
        self._lock = threading.Lock()
        self.position = (shared.epoch, shared.digest)
        self.fresh = True
        self.resynced = 0

    @property
    def epoch(self) -> int:
        """Global steps that the state has seen."""
        return self.position[0]

    @property
    def digest(self) -> str:
        """Of the state, by which members are matched."""
        return self.position[1]

    @contextmanager
    def use(self) -> Iterator[SharedState]:
        """A context in which the state does not change."""
        with self._lock:
            yield self._shared

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

    def patch(self, tree: Any, chunks: Mapping[int, memoryview]) -> None:
        """Become the state whose chunks were taken. Raises ValueError, with nothing changed, where they do not fit."""
        with self._lock:
            same_step = tree.step == self._shared.epoch
            self._shared.patch(tree, chunks)
            self._changed()
        if same_step and self.epoch:
            self.resynced += len(chunks)

    def _changed(self) -> None:
        self.position = (self._shared.epoch, self._shared.digest)
        self.fresh = True


def state_key(epoch: int, digest: str) -> str:
    """Short enough for a DHT key, long enough to tell states apart."""
    return f"{epoch}_{digest[:16]}"

"""A state that costs nothing: the number of steps, and a hash over all averages that led to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tt_cli.swarm.shared_state import StepFacts

BLOCKS, BLOCK, PLACES = 4, 256, 64  # a member has one place in each block: what it gives is 1 there, and 0 elsewhere
SHAPES = {"weight": torch.Size([BLOCKS, BLOCK]), "bias": torch.Size([PLACES])}


def gradient_of(number: int) -> dict[str, torch.Tensor]:
    """What the member with this number gives."""
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    gradients["weight"][:, number] = gradients["bias"][number] = 1.0
    return gradients


class SimulatedTree(NamedTuple):
    """The hash tree of such a state."""

    step: int
    digest: str


class Chunks(dict[int, memoryview]):
    """None travel."""

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass
class Taken:
    """In the place of `ReceivedState`."""

    tree: SimulatedTree
    donors: list[str]
    received: int = 0
    chunks: Chunks = field(default_factory=Chunks)
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        return []


class SimulatedState:
    """A `SharedState`. before, average: the state from which the newest step was made, and its average's blocks.

    taken_at: when it began, or was taken over."""

    def __init__(self, position: tuple[int, str] = (0, "00")):
        self.epoch, self.digest = position
        self.before, self.average = position, np.zeros((BLOCKS, PLACES))
        self.taken_at = asyncio.get_running_loop().time()

    @property
    def tree(self) -> SimulatedTree:
        return SimulatedTree(self.epoch, self.digest)

    def shapes(self) -> dict[str, torch.Size]:
        return SHAPES

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        self.before = (self.epoch, self.digest)
        whole = hashlib.sha256(self.digest.encode())
        for name in SHAPES:
            values = gradients[name].numpy()
            whole.update(values.tobytes())
            if name == "weight":
                self.average = values[:, :PLACES].copy()
        self.epoch, self.digest = self.epoch + 1, whole.hexdigest()
        return StepFacts(0.1, 1.0)

    def patch(self, tree: SimulatedTree, chunks: Any) -> None:
        self.epoch, self.digest = tree
        self.taken_at = asyncio.get_running_loop().time()

    def read_tree(self, manifest: bytes) -> Any:
        raise NotImplementedError("states are handed over as they are")

    write_into = read_tree

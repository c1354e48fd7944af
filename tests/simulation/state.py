"""A state that costs nothing: the number of steps, and a hash over all averages that led to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgpack
import numpy as np
import torch

from tt_cli.swarm.shared_state import StepFacts

BLOCKS, BLOCK, PLACES = 4, 256, 64  # a member has one place in each block: what it gives is 1 there, and 0 elsewhere
CHUNK, CHUNKS = 32, 4  # bytes of one, and how many travel
SHAPES = {"weight": torch.Size([BLOCKS, BLOCK]), "bias": torch.Size([PLACES])}


def gradient_of(number: int) -> dict[str, torch.Tensor]:
    """What the member with this number gives."""
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    gradients["weight"][:, number] = gradients["bias"][number] = 1.0
    return gradients


class SimulatedTree(NamedTuple):
    """The hash tree of such a state: its chunks follow from its digest."""

    step: int
    digest: str

    @property
    def nbytes(self) -> int:
        return CHUNK * CHUNKS

    def __len__(self) -> int:
        return CHUNKS

    def differing(self, other: SimulatedTree) -> list[int]:
        return list(range(CHUNKS)) if other.digest != self.digest else []

    def chunk(self, index: int) -> bytes:
        return hashlib.sha256(f"{self.digest} {index}".encode()).digest()

    def holds(self, index: int, data: bytes | memoryview) -> bool:
        return bytes(data) == self.chunk(index)

    def name_of(self, index: int) -> str:
        return f"weight[{index}]"

    def place(self, index: int) -> tuple[int, int]:
        return CHUNK * index, CHUNK

    def manifest(self) -> bytes:
        return msgpack.packb((self.step, self.digest))

    def write_into(self, write: Callable[[int, bytes], object]) -> None:
        for index in range(len(self)):
            write(self.place(index)[0], self.chunk(index))


def read_tree(manifest: bytes) -> SimulatedTree:
    """The tree of a manifest. Raises ValueError."""
    try:
        step, digest = msgpack.unpackb(manifest)
    except Exception as error:
        raise ValueError("no manifest") from error
    if type(step) is not int or not isinstance(digest, str):
        raise ValueError("no manifest")
    return SimulatedTree(step, digest)


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

    def patch(self, tree: SimulatedTree, chunks: Mapping[int, memoryview]) -> None:
        if not all(tree.holds(index, chunks.get(index, b"")) for index in tree.differing(self.tree)):
            raise ValueError("a chunk is missing or wrong")
        self.epoch, self.digest = tree.step, tree.digest
        self.taken_at = asyncio.get_running_loop().time()

    def read_tree(self, manifest: bytes) -> SimulatedTree:
        return read_tree(manifest)

    def write_into(self, write: Callable[[int, bytes], object]) -> SimulatedTree:
        self.tree.write_into(write)
        return self.tree

"""The memory of a training peer, item by item: on its device, and of the host for its whole family of processes.

Nothing is allocated for it, and torch is not imported: the decoder's tensors and the order of its work give the bytes.
What no formula gives (interpreters, libraries, what the C library's allocator holds beyond what is in use) was
measured, see docs/performance.md; scripts/bench peer measures the whole again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from tt_cli.memory.activations import Activations, activations
from tt_cli.memory.byte_sizes import shown
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import DalleRun, RunConfig

Kind = Literal["cpu", "cuda"]
Place = Literal["device", "host"]

MIB = 2**20
# Measured on Linux, x86-64, Python 3.11, torch 2.13 (CPU): a peer of a run with next to no parameters.
PROCESSES = {"trainer": 204 * MIB, "DHT": 137 * MIB, "p2p daemon": 66 * MIB, "averager": 135 * MIB}
LIBRARIES = 254 * MIB
HELD_BY_ALLOCATOR = 0.24  # of activations on a CPU: freed blocks that no other allocation fits
CHUNK = 4096  # elements of large tensors of which a sparse message has some
BITSANDBYTES = 4096, 256  # elements from which a tensor's moments are in 8 bits, and that share a scale
AVERAGING = 1.0  # bytes per parameter that a round's messages take, in the averager
# Not measured: no GPU was at hand. What CUDA's libraries commonly take of a process and of a GPU.
CUDA_ON_HOST, CUDA_ON_DEVICE = 2048 * MIB, 600 * MIB


@dataclass(frozen=True)
class MemoryComponent:
    """One use of memory, in bytes. assumed: a common figure that was not measured."""

    what: str
    bytes: int
    place: Place
    assumed: bool = False


# CUDA's own memory, of a GPU and of the host.
CUDA = (
    MemoryComponent("CUDA", CUDA_ON_DEVICE, "device", assumed=True),
    MemoryComponent("CUDA", CUDA_ON_HOST, "host", assumed=True),
)


def place_of(kind: Kind) -> Place:
    """The memory that training takes most of."""
    return "host" if kind == "cpu" else "device"


@dataclass(frozen=True)
class Need:
    """The account of one peer with `micro_batch` examples at a time."""

    items: tuple[MemoryComponent, ...]
    micro_batch: int

    @property
    def device(self) -> int:
        """Bytes of GPU memory; 0 where the CPU trains."""
        return self.total("device")

    @property
    def host(self) -> int:
        """Bytes of RAM."""
        return self.total("host")

    def in_words(self, place: Place) -> str:
        """The largest items: "gradients 12.8 MiB, …"."""
        items = sorted((item for item in self.items if item.place == place), key=lambda item: -item.bytes)
        return ", ".join(f"{item.what} {shown(item.bytes)}" for item in items[:3])

    def total(self, place: Place) -> int:
        """Bytes of one of both."""
        return sum(item.bytes for item in self.items if item.place == place)


class TaskAccount(Protocol):
    """Memory and operations of a run's task, asked without loading anything."""

    @property
    def reversible(self) -> bool:
        """True for a model that scales its gradients to fp16's range and keeps as many activations as `keep` says."""
        return False

    @property
    def recomputes(self) -> bool:
        """True for a model that computes again for the backward pass what `keep` does not let it keep."""
        return self.reversible

    @abstractmethod
    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        """The memory of a training peer at its worst moment. itemsize: bytes of products. budget: as in `keep`."""

    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of one sample's forward and backward pass."""

    @abstractmethod
    def tensor_sizes(self) -> list[int]:
        """Elements of each parameter that is trained."""

    def sizes(self) -> dict[str, int]:
        """{"parameters": distinct ones, "effective": counted in every layer that uses them}."""
        return dict.fromkeys(("parameters", "effective"), sum(self.tensor_sizes()))


AccountOf = Callable[[RunConfig], TaskAccount]


class DalleAccount(TaskAccount):
    """That of a DALL-E's run."""

    def __init__(self, run: RunConfig) -> None:
        self.run: DalleRun = DalleRun.of(run)

    @cached_property
    def _config(self) -> DalleConfig:
        return DalleConfig.from_run(self.run)

    @property
    def reversible(self) -> bool:
        return self.run.model.reversible

    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        computed = activations(self._config, micro_batch, itemsize, budget, kind)
        items = peer_items(self.run, kind, self._config.tensor_sizes, self._config.matrix_sizes, computed)
        return Need(items, micro_batch)

    def flops(self) -> int:
        return self._config.flops_per_sample()

    def sizes(self) -> dict[str, int]:
        return {"parameters": sum(self.tensor_sizes()), "effective": self._config.effective_parameters}

    def tensor_sizes(self) -> list[int]:
        return self._config.tensor_sizes


def peer_items(
    run: RunConfig, kind: Kind, sizes: list[int], matrices: list[int], computed: Activations
) -> tuple[MemoryComponent, ...]:
    """All that a training peer takes. sizes: elements of the model's tensors; matrices: of those that are matrices."""
    parameters = sum(sizes)
    state, inner = 4 * parameters, 0
    if run.optimizer.name == "local":  # on GPUs bitsandbytes' AdamW
        smallest, block = BITSANDBYTES if kind == "cuda" else (math.inf, 1)
        inner = moment_bytes(sizes, smallest, block)
        if run.optimizer.inner == "muon":  # one moment of a matrix, in fp32
            inner += 4 * sum(matrices) - moment_bytes(matrices, smallest, block)
    else:
        state += moment_bytes(sizes, run.optimizer.min_8bit_size, run.optimizer.block_size)
    trained = [
        ("parameters in training", 4 * parameters),
        ("gradients", 4 * parameters),
        ("accumulated gradients", 4 * parameters),
        *([("inner moments", inner)] if inner else []),
        ("activations kept", computed.kept),
        ("activations at work", computed.workspace),
        *([("weights in half precision", computed.casts)] if computed.casts else []),
    ]
    host = [
        ("shared state", state),
        ("its copy for a backup", state),
        *([("what messages left out", 2 * parameters)] if run.sparse else []),
        *([("parameters amid a round", 4 * parameters)] if inner and run.optimizer.delayed else []),
        *round_items(sizes, sum(round_bytes(run, sizes, CHUNK))),
        ("processes", sum(PROCESSES.values())),
        ("libraries", LIBRARIES),
        *([("held by the allocator", int(HELD_BY_ALLOCATOR * computed.total))] if kind == "cpu" else []),
    ]
    place = place_of(kind)
    items = [MemoryComponent(what, size, place) for what, size in trained]
    items += [MemoryComponent(what, size, "host") for what, size in host]
    return (*items, *(CUDA if kind == "cuda" else ()))


def round_items(sizes: list[int], encoded: int) -> list[tuple[str, int]]:
    """Host memory of averaging tensors of these sizes. encoded: bytes of a gradient and of an average."""
    return [
        ("encoded gradient and average", encoded),
        ("largest tensor decoded", 4 * max(sizes)),
        ("a round's messages", int(AVERAGING * sum(sizes))),
    ]


def moment_bytes(sizes: Iterable[int], smallest: float, block: int) -> int:
    """Both moments of every tensor in 8 bits: a byte for each element and a float32 for each block, or 4 bytes each.

    smallest: elements from which a tensor's moments are in 8 bits. block: elements that share a scale.
    """
    return sum(2 * size + 8 * -(-size // block) if size >= smallest else 8 * size for size in sizes)


def round_bytes(run: RunConfig, sizes: list[int], members: int) -> tuple[int, int]:
    """A gradient, or what a member sends instead of one, and the average of so many of them, as they travel."""
    swarm, kept = run.swarm, run.sparse
    if not kept:
        return (encoded_bytes(sizes, swarm.compression, swarm.large_tensor),) * 2
    chunks = sum(-(-size // CHUNK) for size in sizes if size >= swarm.large_tensor)
    small = 2 * sum(size for size in sizes if size < swarm.large_tensor)
    values = min(CHUNK, members * kept)  # of a chunk, where no two members send the same
    return chunks * (2 + kept * 14 // 8) + small, chunks * (2 + CHUNK // 8 + values // 2) + small


def encoded_bytes(sizes: list[int], compression: str, large_tensor: int = 65536) -> int:
    """One gradient as it travels: a byte for each element of large tensors and a scale per block, else two bytes.

    compression: linear8 or blockwise8, as in a run file; fp16 and fp32 for comparison.
    """
    if compression in ("fp16", "fp32"):
        return (2 if compression == "fp16" else 4) * sum(sizes)
    block, scale = (256, 2) if compression == "linear8" else (4096, 4)
    large = sum(size for size in sizes if size >= large_tensor)
    return large + scale * -(-large // block) + 2 * (sum(sizes) - large)

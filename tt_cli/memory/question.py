"""A question to the calculator: what is left out is chosen, and every choice says its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tt_cli.errors import UsageError
from tt_cli.memory.calculator import Answer, Compression, Optimizer
from tt_cli.memory.operations import Attention, Kind, Layers, Precision

MOST_EXAMPLES = 1 << 16
EXAMPLES = 512  # of a global step, where nothing says more


@dataclass(frozen=True)
class CalculatorQuestion:
    """A question. None: choose. gpu, cpu: an amount of memory, or a GPU's name; cpu "": a CPU without a limit."""

    model: str
    gpu: str | None = None
    cpu: str | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    bits: int | None = None
    offload: bool = False
    layers: Layers | None = None
    share: int | None = None
    untied: bool = False
    attention: Attention | None = None
    sequence: int | None = None
    micro_batch: int | None = None
    compression: Compression | None = None
    alone: bool = False
    peers: int = 16
    mbits: float = 100.0
    examples: int | None = None

    @property
    def kind(self) -> Kind:
        """The device on which training runs."""
        return "cuda" if self.cpu is None else "cpu"

    def check(self) -> None:
        """Raises UsageError for values out of range and for flags that contradict each other."""
        for name, value in (
            ("--micro-batch", self.micro_batch),
            ("--sequence", self.sequence),
            ("--share", self.share),
        ):
            if value is not None and not 1 <= value <= MOST_EXAMPLES:
                raise UsageError(f"{name} {value}: must be 1 to {MOST_EXAMPLES}")
        if self.examples is not None and not 1 <= self.examples <= 10**9:
            raise UsageError(f"--examples {self.examples}: must be 1 to a billion")
        if not 1 <= self.peers <= 10**6:
            raise UsageError(f"--peers {self.peers}: must be 1 to a million")
        if not 0.001 <= self.mbits <= 10**6:
            raise UsageError(f"--line {self.mbits:g}: must be 0.001 to 1000000 Mbit/s")
        if self.gpu is not None and self.cpu is not None:
            raise UsageError("--gpu and --cpu: training runs on one of both")
        if self.alone and self.compression is not None:
            raise UsageError("--alone leaves averaging out: --compression has no meaning with it")


class Subject(Protocol):
    """The subject of a question: one of the architectures, or a run."""

    reasons: dict[str, str]

    @property
    def title(self) -> str:
        """The name for people."""

    def answer(self, micro_batch: int) -> Answer:
        """The account with so many examples at a time."""

    def change(self, micro_batch: int, room: int) -> list[str] | None:
        """The smallest change that makes it fit; None where none does."""

    def compared(self) -> list[tuple[str, Subject]]:
        """The same with other techniques, by name."""

    def network(self, peers: int) -> int:
        """Bytes that a peer sends, and receives, for a global step."""

    def flops(self) -> int:
        """Floating-point operations of one example."""

    def examples(self) -> tuple[int, str]:
        """Examples of a global step, and why so many."""

    def described(self) -> dict[str, Any]:
        """Its settings, for people and for --json."""

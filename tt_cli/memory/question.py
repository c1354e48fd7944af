"""A question to the calculator, and the way to train that answers it: what is left out is chosen, with its reason."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tt_cli.errors import UsageError
from tt_cli.memory.architectures import Architecture
from tt_cli.memory.trainer_account import Kind

MOST_EXAMPLES = 1 << 16
EXAMPLES = 512  # of a global step, where nothing says more

Precision = Literal["fp32", "mixed", "pure16"]
Attention = Literal["eager", "fused"]
Layers = Literal["kept", "checkpointed", "reversible"]
Optimizer = Literal["adam", "lamb", "adafactor"]
Compression = Literal["linear8", "blockwise8", "fp16", "fp32"]


@dataclass(frozen=True)
class CalculatorOptions:
    """The options. sequence: 0 for the published one. groups: distinct layers, 0 for all. bits: of the optimizer's
    state. compression: of averaged gradients; None: alone, without a swarm."""

    kind: Kind = "cuda"
    precision: Precision = "mixed"
    attention: Attention = "fused"
    layers: Layers = "kept"
    micro_batch: int = 1
    sequence: int = 0
    groups: int = 0
    tied: bool | None = None
    optimizer: Optimizer = "adam"
    bits: int = 32
    offload: bool = False
    compression: Compression | None = "linear8"

    def check(self, model: Architecture) -> None:
        """Raises UsageError for what does not exist."""
        if self.optimizer == "adafactor" and self.bits == 8:
            raise UsageError("Adafactor has no 8-bit state: it keeps rows and columns already; leave --8bit out")
        if model.family == "t5" and self.attention == "fused":
            raise UsageError("T5 adds a learned bias to its scores, which fused attention has not: --attention eager")
        if self.offload and self.kind == "cpu":
            raise UsageError("--offload moves the optimizer from a GPU to the host; with --cpu all of it is there")
        if model.positions and self.sequence > model.positions and not model.keys:
            raise UsageError(f"{model.title} has {model.positions} positions: --sequence {self.sequence} is too long")
        if self.sequence and model.keys:
            raise UsageError(f"{model.title}'s sequence is its caption and its picture: leave --sequence out")
        if self.groups > model.layers:
            raise UsageError(f"{model.title} has {model.layers} layers: --share must be 1 to {model.layers}")


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
        for flag, value, least, most, words in (
            ("--micro-batch", self.micro_batch, 1, MOST_EXAMPLES, MOST_EXAMPLES),
            ("--sequence", self.sequence, 1, MOST_EXAMPLES, MOST_EXAMPLES),
            ("--share", self.share, 1, MOST_EXAMPLES, MOST_EXAMPLES),
            ("--examples", self.examples, 1, 10**9, "a billion"),
            ("--peers", self.peers, 1, 10**6, "a million"),
            ("--line", self.mbits, 0.001, 10**6, "1000000 Mbit/s"),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{flag} {value:.12g}: must be {least} to {words}")
        if self.gpu is not None and self.cpu is not None:
            raise UsageError("--gpu and --cpu: training runs on one of both")
        if self.alone and self.compression is not None:
            raise UsageError("--alone leaves averaging out: --compression has no meaning with it")


def largest_that_fits(taken: Callable[[int], int], room: int) -> int:
    """The most examples at a time within `room` bytes; 0 where one is too many. taken: bytes, growing with them."""
    if taken(1) > room:  # a look at more than eight may trace three passes
        return 0
    return bisect_right(range(1, 2 * MOST_EXAMPLES), room, key=taken)

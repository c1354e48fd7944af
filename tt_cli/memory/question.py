"""A question to the calculator: what is left out is chosen, and every choice says its reason."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tt_cli.errors import UsageError
from tt_cli.memory.options import Attention, Compression, Layers, Optimizer, Precision
from tt_cli.memory.trainer_account import Kind

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
    if taken(1) > room:
        return 0
    low, high = 1, 2
    while high <= MOST_EXAMPLES and taken(high) <= room:
        low, high = high, 2 * high
    return low + bisect_right(range(low + 1, high), room, key=taken)

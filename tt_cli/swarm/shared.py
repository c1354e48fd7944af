"""What all members hold alike, as the swarm needs it: the peer implements it from model, optimizer and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepFacts:
    """learning_rate and gradient_norm (before clipping) of one global step."""

    learning_rate: float
    gradient_norm: float


class SharedState(Protocol):
    """Parameters, optimizer state and the count of steps. Equal on all members, to the last bit.

    Called by one thread at a time; `Collaboration` sees to it.
    """

    @property
    def epoch(self) -> int:
        """Global steps that these parameters have seen."""

    @property
    def digest(self) -> str:
        """Hex digest of all of it: equal digests mean equal bytes."""

    def shapes(self) -> dict[str, torch.Size]:
        """Name → shape of every gradient, in the order in which gradients travel."""

    def nbytes(self) -> int:
        """Bytes of the packed state, to within a few per cent."""

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        """Apply one averaged gradient (fp32, CPU, finite). Afterwards `epoch` is one more."""

    def pack(self) -> bytes:
        """All of it, for another peer or a file."""

    def adopt(self, data: bytes, signed: Callable[[int, str], bool]) -> None:
        """Become what `data` holds if `signed(epoch, digest)` of it is true.

        Raises ValueError, with nothing changed, for bytes that are no state of this run or that nobody signed.
        """

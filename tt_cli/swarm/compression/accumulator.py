"""This peer's gradients and losses on their way into a round."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer


@dataclass
class LossSums:
    """Losses times samples, summed over what was accumulated."""

    samples: int = 0
    total: float = 0.0
    text: float = 0.0
    image: float = 0.0

    def add(self, samples: int, total: float, text: float, image: float) -> None:
        """Count in the mean losses of one micro-batch."""
        self.samples += samples
        self.total += total * samples
        self.text += text * samples
        self.image += image * samples

    def merge(self, other: LossSums) -> None:
        """Count in all that another one counted."""
        self.samples += other.samples
        self.total += other.total
        self.text += other.text
        self.image += other.image

    def mean(self, value: float) -> float | None:
        """`value` per sample; None before the first."""
        return value / self.samples if self.samples else None


class Accumulator:
    """Sums of gradients on the device; the part that a round under way averages is held apart.

    new: losses of what was accumulated since the last `hold`. held: losses of the gradient in the round, empty when
    there is none. names: the order in which gradients travel. Safe to use from two threads.
    """

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self._sums: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.new, self.held = LossSums(), LossSums()

    @property
    def samples(self) -> int:
        """Samples that wait for the next step, held ones too."""
        return self.held.samples + self.new.samples

    def add(self, gradients: Mapping[str, torch.Tensor], samples: int, *losses: float) -> None:
        """Count in the mean gradient of one micro-batch, and its three losses (total, text, image)."""
        with self._lock:
            if not self._sums:
                self._sums = {name: torch.zeros_like(gradients[name]) for name in self._names}
            new = [gradients[name] for name in self._names]
            torch._foreach_add_(list(self._sums.values()), new, alpha=float(samples))
            self.new.add(samples, *losses)

    def hold(self, local: GradientBuffer) -> None:
        """Move all into `local` as a mean; what comes now is for the next step.

        Raises ValueError where the sums are not finite: they are dropped then, and `local` holds zeros.
        """
        with self._lock:
            self.held, self.new = self.new, LossSums()
            try:
                self._encode(local)
            except ValueError:
                self.held = LossSums()
                self._clear()
                self._encode(local)
                raise
            self._clear()

    def _clear(self) -> None:
        for sums in self._sums.values():
            sums.zero_()

    def _encode(self, local: GradientBuffer) -> None:
        for name, shape in local.layout.shapes.items():
            sums = self._sums.get(name)
            local.encode(name, torch.zeros(shape) if sums is None else sums, max(1, self.held.samples))

    def give_back(self, local: GradientBuffer) -> None:
        """The others stepped without the gradient held: it counts for the next step, one step late."""
        with self._lock:
            if self.held.samples:
                for name, tensor in DecodedGradients(local).items():
                    self._sums[name].add_(tensor.to(self._sums[name].device), alpha=float(self.held.samples))
                self.new.merge(self.held)
            self.held = LossSums()

    def forget(self) -> None:
        """What was accumulated belongs to a state that is given up."""
        with self._lock:
            self.held, self.new = LossSums(), LossSums()
            self._clear()

    def release(self) -> LossSums:
        """The gradient held has entered a step. Returns its losses."""
        with self._lock:
            released, self.held = self.held, LossSums()
            return released


def all_finite(gradients: Mapping[str, torch.Tensor]) -> bool:
    """True when no gradient holds NaN or an infinity, and no norm overflows."""
    norms = torch._foreach_norm(list(gradients.values()))
    return bool(torch.isfinite(torch.stack(norms)).all())

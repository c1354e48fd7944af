"""This peer's gradients, and the loss and the figures that go with them, on their way into a round."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer

NamedTensors = Mapping[str, torch.Tensor]


@dataclass
class FigureSums:
    """The loss and the named figures of what was accumulated, each times its samples."""

    samples: int = 0
    loss: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)  # replaced as a whole: two threads read it

    @classmethod
    def of(cls, samples: int, loss: float, means: Mapping[str, float]) -> FigureSums:
        """Those of one micro-batch, from its means."""
        return cls(samples, loss * samples, {name: value * samples for name, value in means.items()})

    def merge(self, other: FigureSums) -> None:
        """Count in all that another one counted."""
        self.samples += other.samples
        self.loss += other.loss
        added = {name: self.figures.get(name, 0.0) + value for name, value in other.figures.items()}
        self.figures = self.figures | added

    def mean_loss(self) -> float | None:
        """Per sample; None before the first."""
        return self.loss / self.samples if self.samples else None

    def mean_figures(self) -> dict[str, float]:
        """Per sample; none before the first."""
        return {name: value / self.samples for name, value in self.figures.items()}


class Accumulator:
    """Sums of gradients on the device; the part that a round under way averages is held apart.

    new: figures of what was accumulated since the last `hold`. held: figures of the gradient in the round, empty when
    there is none. names: the order in which gradients travel. inner_steps: that this peer has made by itself since the
    last global one; None where it makes none. Safe to use from two threads.
    """

    inner_steps: int | None = None

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self._sums: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.new, self.held = FigureSums(), FigureSums()

    @property
    def ready(self) -> bool:
        """True while gradients are wanted."""
        return True

    @property
    def settled(self) -> bool:
        """True where a round may begin."""
        return True

    @property
    def samples(self) -> int:
        """Samples that wait for the next step, held ones too."""
        return self.held.samples + self.new.samples

    def add(self, gradients: NamedTensors, samples: int, loss: torch.Tensor, figures: NamedTensors) -> bool:
        """Count in the mean gradient of one micro-batch, its loss and its figures; the host waits for the device once.

        False, and nothing is counted in, where a gradient, its norm, the loss or a figure is not finite.
        """
        norms = torch._foreach_norm(list(gradients.values()))
        numbers = torch.stack([loss, *figures.values(), *norms]).cpu().tolist()
        if not all(map(math.isfinite, numbers)):
            return False
        with self._lock:
            self._sum_up({name: gradients[name] for name in self._names}, float(samples))
            self._count(FigureSums.of(samples, numbers[0], dict(zip(figures, numbers[1:], strict=False))))
        return True

    def _sum_up(self, gradients: NamedTensors, samples: float) -> None:
        if not self._sums:
            self._sums = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        torch._foreach_add_(list(self._sums.values()), list(gradients.values()), alpha=samples)

    def _count(self, figures: FigureSums) -> None:
        self.new.merge(figures)

    def hold(self, local: GradientBuffer) -> None:
        """Move all into `local` as a mean; what comes now is for the next step.

        Raises ValueError where the sums are not finite: they are dropped then, and `local` holds zeros.
        """
        with self._lock:
            self.held, self.new = self.new, FigureSums()
            try:
                self._encode(local)
            except ValueError:
                self.held = FigureSums()
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

    def set_aside(self, local: GradientBuffer) -> None:
        """Another state is about to be taken over, `give_back` follows: gradients stay as they are."""

    def give_back(self, local: GradientBuffer) -> None:
        """The others stepped without the gradient held: it counts for the next step, one step late."""
        with self._lock:
            if self.held.samples:
                for name, tensor in DecodedGradients(local).items():
                    self._sums[name].add_(tensor.to(self._sums[name].device), alpha=float(self.held.samples))
                self.new.merge(self.held)
            self.held = FigureSums()

    def forget(self) -> None:
        """Drop what was accumulated: it belongs to a state that is given up."""
        with self._lock:
            self.held, self.new = FigureSums(), FigureSums()
            self._clear()

    def release(self) -> FigureSums:
        """The gradient held has entered a step. Returns its figures."""
        with self._lock:
            released, self.held = self.held, FigureSums()
            return released

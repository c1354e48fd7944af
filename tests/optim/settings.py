"""The paper's optimizer settings, with the size from which moments take 8 bits free to choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    beta1: float = 0.9
    beta2: float = 0.96
    eps: float = 1e-6
    weight_decay: float = 0.045
    max_grad_norm: float = 4.0
    trust_clamp: float = 1e4
    block_size: int = 4096
    min_8bit_size: int = 65536


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers that are the same bytes on every processor; torch's own depend on the vector width."""
    numbers = numpy.random.Generator(numpy.random.PCG64(seed)).standard_normal(shape) * scale
    return torch.from_numpy(numbers.astype(numpy.float32))


class PlainLamb:
    """LAMB with fp32 moments and fp64 arithmetic, written from the paper's equations."""

    def __init__(self, parameters: dict[str, Tensor], settings: Settings) -> None:
        self.settings = settings
        self.parameters = {name: p.double() for name, p in parameters.items()}
        self.m = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def step(self, gradients: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
        """One step; returns what it subtracted from each parameter."""
        s = self.settings
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values()))
        factor = min(1.0, s.max_grad_norm / (float(norm) + 1e-6))
        updates = {}
        for name, p in self.parameters.items():
            g = gradients[name].double() * factor
            self.m[name] = s.beta1 * self.m[name] + (1 - s.beta1) * g
            self.v[name] = s.beta2 * self.v[name] + (1 - s.beta2) * g**2
            u = self.m[name] / (self.v[name].sqrt() + s.eps)
            if not name.endswith("bias"):
                u = u + s.weight_decay * p
            p_norm, u_norm = float(p.norm().clamp(0, s.trust_clamp)), float(u.norm())
            trust = p_norm / u_norm if p_norm and u_norm else 1.0
            updates[name] = lr * trust * u
            self.parameters[name] = p - updates[name]
        return updates

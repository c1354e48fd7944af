"""What a member puts in the place of its own gradient: well-formed, finite, of the right shape, and wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tt_cli.swarm.compression.gradient_buffer import GradientBuffer

NOISE = 10.0  # standard deviations of the honest gradient

Poison = Callable[[torch.Tensor, np.random.Generator], torch.Tensor]
"""One tensor's honest gradient (elements,) → what is sent instead."""


def flipped(factor: float) -> Poison:
    """The negative of the gradient, so many times."""
    return lambda values, random: values * -factor


def noise(values: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """Normal numbers, ten times as large as the gradient."""
    spread = NOISE * float(values.square().mean().sqrt())
    return torch.from_numpy(random.standard_normal(values.numel(), dtype=np.float32)) * spread


GRADIENTS: dict[str, Poison] = {
    "sign flip x1": flipped(1.0),
    "sign flip x100": flipped(100.0),
    "random noise": noise,
}


def poison(local: GradientBuffer, attack: str, number: int, step: int) -> None:
    """Replace the whole gradient of one step. number: which attacker this is."""
    random = np.random.default_rng((step, number))
    for name, shape in local.layout.shapes.items():
        values = torch.empty(shape.numel())
        local.decode(name, values)
        local.encode(name, GRADIENTS[attack](values, random))

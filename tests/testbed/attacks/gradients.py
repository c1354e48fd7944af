"""What a member puts in the place of its own gradient: well-formed, finite, of the right shape, and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tt_cli.swarm.compression.gradient_buffer import GradientBuffer
from tt_cli.swarm.compression.sparse import CHUNK

NOISE = 10.0  # standard deviations of the honest gradient
INSIDE = 1.7  # times a member's noise: not yet clipped
BESIDE = 1.6  # the same with noise of its own
LITTLE = 0.18  # of the noise: with it four of seven honest members are further from the mean (Baruch et al. 2019)

Poison = Callable[[torch.Tensor, np.random.Generator], torch.Tensor]
"""One tensor's honest gradient (elements,) → what is sent instead."""


def flipped(factor: float) -> Poison:
    """The negative of the gradient, so many times."""
    return lambda values, random: values * -factor


def noise(times: float) -> Poison:
    """Normal numbers, so many times as large as the gradient."""

    def draw(values: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
        spread = times * float(values.square().mean().sqrt())
        return torch.from_numpy(random.standard_normal(values.numel(), dtype=np.float32)) * spread

    return draw


def lean(values: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """Its own gradient, and as much of a direction that is the same for all attackers in all steps."""
    return values + signs(values) * float(values.square().mean().sqrt())


def lone(values: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """All of the norm of each chunk of a sparse message in one element, the same in all steps and for all attackers."""
    alone = torch.zeros_like(values)
    for place, chunk in zip(alone.split(CHUNK), values.split(CHUNK), strict=True):
        place[len(chunk) // 2] = chunk.norm()
    return alone


def signs(values: torch.Tensor) -> torch.Tensor:
    """A direction for all tensors of this size: 1 or -1 for each element."""
    drawn = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(values.numel()))
    return drawn.to(values.dtype) * 2 - 1


@dataclass(frozen=True)
class Seen:
    """What attackers know who see all gradients, of one tensor. own: of this one, were it honest. step: from 1 on.

    mean: of the honest ones. noise: standard deviation of a gradient of as many samples as this one's, (elements,).
    """

    own: torch.Tensor
    mean: torch.Tensor
    noise: torch.Tensor
    step: int

    def bias(self, strength: float) -> torch.Tensor:
        """So many times the noise, in one direction for ever."""
        return signs(self.mean) * (strength * float(self.noise.square().mean().sqrt()))


COLLUSIONS: dict[str, Callable[[Seen], torch.Tensor]] = {
    "bias": lambda seen: seen.mean + seen.bias(INSIDE),
    "hidden_bias": lambda seen: seen.own + seen.bias(BESIDE),
    "weak_bias": lambda seen: seen.own + seen.bias(0.5),
    "drift": lambda seen: seen.own + seen.bias(min(BESIDE, BESIDE * seen.step / 20)),
    "alie": lambda seen: seen.mean - LITTLE * seen.noise,
    "ipm": lambda seen: -0.5 * seen.mean,
}

GRADIENTS: dict[str, Poison] = {
    "sign flip x1": flipped(1.0),
    "sign flip x100": flipped(100.0),
    "random noise": noise(NOISE),
    "steady bias": lean,
    "noise x1": noise(1.0),
    "lone coordinate": lone,
    "zero work": lambda values, random: torch.zeros_like(values),
}


def poison(local: GradientBuffer, attack: str, number: int, step: int) -> None:
    """Replace the whole gradient of one step. number: which attacker this is."""
    random = np.random.default_rng((step, number))
    for name, shape in local.layout.shapes.items():
        values = torch.empty(shape.numel())
        local.decode(name, values)
        local.encode(name, GRADIENTS[attack](values, random))

"""The outer step of local steps: shared parameters go the way that the members' own went on average.

DiLoCo (arXiv:2311.08105) without outer momentum: theta - outer_lr * mean of (theta - theta_i). One product and one
difference for each element, by the kernels of LAMB's last pass, so equal bytes on every machine. There are no moments:
the shared state is the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from tt_cli.errors import TTError
from tt_cli.optim.kernels import LambKernels, implementation
from tt_cli.optim.lamb import Lamb8bit, StepReport, check_bound, check_tensor, checked_norm

if TYPE_CHECKING:
    from tt_cli.run.sections import LocalPart, OptimizerPart

STATE = "outer"
"""The name of its only tensor, which is empty: it tells a state to train on from weights to draw with."""


class OuterStep:
    """The outer optimizer over `parameters`: names to contiguous fp32 tensors on the CPU, updated in place."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: LocalPart, kernels: LambKernels | None = None):
        for name, parameter in parameters.items():
            check_tensor("parameter", name, parameter)
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._rate, self._kernels = settings.outer_lr, kernels or implementation().kernels

    @torch.no_grad()
    def step(self, ways: Mapping[str, Tensor], lr: float) -> StepReport:
        """Take one step along `ways`, the mean of the members' theta - theta_i. **Uses them up**.

        lr: of the inner steps, not used. Raises NonFiniteGradient, ValueError, NonFiniteState as `Lamb8bit.step`.
        """
        norm = checked_norm(self._parameters, ways, self._kernels)
        squares = 0.0
        for name, parameter in self._parameters.items():
            p, way = parameter.detach().view(-1), ways[name].detach().view(-1)
            own = self._kernels.squares(p, 0.0)
            check_bound(name, math.sqrt(own), self._rate * norm)
            self._kernels.subtract(p, way, self._rate)
            squares += own
        return StepReport(norm, 1.0, math.sqrt(squares), self._rate * norm)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing but the empty tensor STATE."""
        return {STATE: torch.empty(0)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """TTError where the state is another optimizer's."""
        if state.keys() != {STATE} or state[STATE].numel():
            raise TTError("a state with an optimizer's moments: of a run without local steps")


SharedOptimizer: TypeAlias = Lamb8bit | OuterStep


def shared_optimizer(parameters: Mapping[str, Tensor], settings: OptimizerPart | LocalPart) -> SharedOptimizer:
    """What makes a run's global steps, with its settings, over `parameters`."""
    return OuterStep(parameters, settings) if settings.name == "local" else Lamb8bit(parameters, settings)

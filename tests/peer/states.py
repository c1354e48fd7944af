"""A model of two layers in the place of the Dalle, and states that do not fit it."""

from __future__ import annotations

import torch
from optim.settings import normal
from torch import Tensor, nn

from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig, load_run


def small_run(**changes: object) -> RunConfig:
    """The built-in run with 600 steps, whatever its own are; its learning rate is high from the first step on."""
    return load_run("emoji").replaced({"schedule.warmup_fraction": 0.0, "schedule.total_steps": 600, **changes})


def layers(seed: int = 0, width: int = 260) -> nn.Module:
    """One tensor with 8-bit moments, three with fp32 ones."""
    model = nn.Sequential(nn.Linear(256, width), nn.Linear(width, 5))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(100 * seed + index, *parameter.shape, scale=0.1))
    return model


def trained(seed: int = 0, steps: int = 0, run: RunConfig | None = None, width: int = 260) -> TrainedState:
    """A state after `steps` steps with gradients that are the same for all."""
    state = TrainedState(run or small_run(), layers(seed, width), None)
    for step in range(steps):
        state.step(gradients(state, step))
    return state


def gradients(state: TrainedState, seed: int) -> dict[str, Tensor]:
    return {
        name: normal(1000 + 10 * seed + index, *shape, scale=0.01)
        for index, (name, shape) in enumerate(state.shapes().items())
    }

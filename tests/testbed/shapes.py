"""What a simulated training loop computes: the shapes of a real model, gradients from a seed, and the time of a device.

Nothing here knows how peers average. The device is simulated by its time alone: a micro-batch takes so many seconds,
in which the host's cores are free for everything else, as beside a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import RunConfig

LARGE = 2**16 + 1  # elements from which everybody's codecs and optimizers take a tensor for a large one
POOL = 2**21 + 17  # numbers that all gradients are cut from; odd, so that cuts do not repeat
GRADIENT_SCALE = 1e-3


def model_shapes(run: RunConfig, part: float = 1.0) -> dict[str, torch.Size]:
    """Name to shape of every parameter of a run's model, in the model's order.

    part: below 1, large tensors keep about that part of their rows, but stay large; small tensors stay as they are.
    """
    with torch.device("meta"):
        model = Dalle(DalleConfig.from_run(run))
    return {name: _cut(parameter.shape, part) for name, parameter in model.named_parameters()}


def _cut(shape: torch.Size, part: float) -> torch.Size:
    if part >= 1 or shape.numel() < LARGE:
        return shape
    row = shape[1:].numel()
    return torch.Size([min(shape[0], max(round(shape[0] * part), -(-LARGE // row))), *shape[1:]])


def count(shapes: dict[str, torch.Size]) -> int:
    """Parameters in all."""
    return sum(shape.numel() for shape in shapes.values())


def first_parameters(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters to begin with, the same for everyone: normal, standard deviation 0.02."""
    pool = torch.from_numpy(np.random.default_rng(0).standard_normal(POOL, dtype=np.float32)) * 0.02
    for index, (name, shape) in enumerate(shapes.items()):
        tensor = torch.empty(shape)
        _fill(tensor, pool, index * 7919, add=False)
        yield name, tensor


class Gradients:
    """Gradients of any shapes from a small pool of normal numbers: no memory of their own, little time.

    seed: another one gives other gradients. Tensors differ in scale by a factor of about e, as a model's do.
    """

    def __init__(self, shapes: dict[str, torch.Size], seed: int):
        generator = np.random.default_rng(seed)
        self._pool = torch.from_numpy(generator.standard_normal(POOL, dtype=np.float32)) * GRADIENT_SCALE
        self._scales = np.exp(np.random.default_rng(1).standard_normal(len(shapes)))
        self._drawn = 0

    def write(self, tensors: list[torch.Tensor], *, add: bool) -> None:
        """The next gradient into `tensors`, one for each shape, or added to what they hold."""
        for index, tensor in enumerate(tensors):
            start = (self._drawn * 104_729 + index * 7919) % POOL
            _fill(tensor, self._pool, start, add=add, scale=float(self._scales[index]))
        self._drawn += 1


@torch.no_grad()
def _fill(tensor: torch.Tensor, pool: torch.Tensor, start: int, *, add: bool, scale: float = 1.0) -> None:
    flat, done = tensor.view(-1), 0
    while done < len(flat):
        piece = pool[start % POOL :][: len(flat) - done]
        target = flat[done : done + len(piece)]
        if add:
            target.add_(piece, alpha=scale)
        else:
            torch.mul(piece, scale, out=target)
        done, start = done + len(piece), 0


class Device:
    """Takes `seconds` for every micro-batch, waiting; `ended` cuts the wait short.

    busy_seconds: how long it computed in all. Filling gradients is part of a micro-batch's time.
    """

    def __init__(self, gradients: Gradients, seconds: float, ended: threading.Event):
        self._gradients, self._seconds, self._ended = gradients, seconds, ended
        self.busy_seconds = 0.0
        self.micro_batches = 0

    def compute(self, tensors: list[torch.Tensor], *, add: bool) -> None:
        """One forward and backward: the next gradient into `tensors`, or added to them."""
        started = time.monotonic()
        self._gradients.write(tensors, add=add)
        left = started + self._seconds - time.monotonic()
        if left > 0:
            self._ended.wait(left)
        self.busy_seconds += time.monotonic() - started
        self.micro_batches += 1

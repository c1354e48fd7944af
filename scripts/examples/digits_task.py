"""A task in one file: to add two digits. docs/add-a-task.md goes through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tt_cli.data.examples import Batch, RowCounts
from tt_cli.data.stream.plan import session_seed
from tt_cli.memory import Kind, Need
from tt_cli.memory.activations import Activations
from tt_cli.memory.trainer_account import peer_items
from tt_cli.run import RunConfig
from tt_cli.run.sections import DataPart, Section
from tt_cli.task.task import Losses, Task


class DigitsPart(Section):
    """A model that adds two digits."""

    kind: Literal["digits"]
    width: int = Field(32, ge=1, description="of the hidden layer")


class DigitsRun(RunConfig):
    """The run of such a model; its examples are made up."""

    kind = "digits"
    task_class = f"{__name__}:DigitsTask"
    task: DigitsPart
    data: DataPart = DataPart(source="builtin", name="digits")


class Adder(nn.Module):
    """Digits (b, 2) int64 → logits (b, 19) of their sum."""

    def __init__(self, width: int, seed: int | None):
        super().__init__()
        self.digits = nn.Embedding(20, width)
        self.sums = nn.Linear(width, 19)
        if seed is not None:  # first weights in equal bytes on all machines, as torch's own are not
            random = np.random.Generator(np.random.PCG64(seed))
            for parameter in self.parameters():
                parameter.data.copy_(torch.from_numpy(random.uniform(-0.5, 0.5, tuple(parameter.shape))))

    def forward(self, digits: Tensor) -> Tensor:
        places = digits + torch.tensor([0, 10], device=digits.device)  # the second digit has rows of its own
        return self.sums(torch.relu(self.digits(places).sum(dim=1)))


class MadeUp:
    """Pairs of digits without end."""

    def __init__(self, seed: int):
        self.counts, self._random = RowCounts(), np.random.default_rng(seed)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            digits = torch.from_numpy(self._random.integers(0, 10, (batch_size, 2)))
            yield Batch({"digits": digits, "sum": digits.sum(dim=1)})

    def close(self) -> None: ...


class DigitsTask(Task[Adder]):
    """What a `DigitsRun` trains."""

    def __init__(self, run: RunConfig):
        self.run: DigitsRun = DigitsRun.of(run)

    @property
    def width(self) -> int:
        return self.run.task.width

    def model(self, seed: int | None) -> Adder:
        return Adder(self.width, seed)

    def examples(self, seed: int, *, peer: str = "", **_: Any) -> MadeUp:
        return MadeUp(session_seed(seed, peer))

    def losses(self, model: Adder, batch: Batch) -> Losses:
        logits, right = model(batch.tensors["digits"]), batch.tensors["sum"]
        return cross_entropy(logits.float(), right), {"wrong": (logits.argmax(dim=1) != right).float().mean()}

    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        shapes = self.shapes().values()
        sizes, matrices = ([shape.numel() for shape in shapes if len(shape) >= least] for least in (1, 2))
        kept = Activations(micro_batch * itemsize * (3 * self.width + 19), 0, 0)
        return Need(peer_items(self.run, kind, sizes, matrices, kept), micro_batch)

    def flops(self) -> int:
        return 6 * 19 * self.width

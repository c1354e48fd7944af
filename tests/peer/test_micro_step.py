"""One micro-batch of a real model: tried out, interrupted, and counted in once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.model.dalle import Dalle
from tt_cli.peer.device import Device
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.peer.trained_state import TrainedState
from tt_cli.peer.trainer import MicroStep
from tt_cli.run import RunConfig, load_run
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.shared_state import LockedState
from tt_cli.task import task_of

CPU = Device(torch.device("cpu"), "a CPU", None)


class Collaboration:
    """Sums gradients, as the real one does."""

    state, epoch = SimpleNamespace(fresh=False), 0

    def __init__(self, model: Dalle):
        self.sums = Accumulator([name for name, _ in model.named_parameters()])
        self.about = SimpleNamespace(micro_batch=0)

    def step(self, *counted: Any) -> bool:
        return self.sums.add(*counted)


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return load_run("emoji-demo").replaced({"model.dim": 32, "model.depth": 2, "model.heads": 2, "model.dim_head": 16})


@pytest.fixture
def stream(run: RunConfig) -> ExampleStream:
    return ExampleStream(run, load_tokenizer(run), 0)


def made(run: RunConfig) -> tuple[MicroStep, Collaboration]:
    task = task_of(run)
    model = task.new_model()
    collaboration = Collaboration(model)
    return MicroStep(task, model, CPU, collaboration, None), collaboration  # type: ignore[arg-type]


def test_the_first_micro_batch_is_computed_with_the_states_parameters(run: RunConfig, stream: ExampleStream) -> None:
    """A peer that begins with its backup has a model with the run's first weights until then."""
    model = task_of(run).new_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    shared = TrainedState(run, model, None)
    plain, collaboration = made(run)
    collaboration.state = LockedState(shared)  # type: ignore[assignment]
    step = MicroStep(plain.task, plain.model, CPU, collaboration, shared)  # type: ignore[arg-type]
    step(next(stream.batches(2)))
    theirs = shared.state().parameters
    assert all(torch.equal(own, theirs[name]) for name, own in plain.model.named_parameters())


def test_trying_out_counts_nothing(run: RunConfig, stream: ExampleStream) -> None:
    step, collaboration = made(run)
    compute = step.probe(stream)
    for size in (1, 3, 20):
        compute(size)
    assert collaboration.sums.samples == 0


def test_pieces_of_a_batch_sum_up_to_the_whole(run: RunConfig, stream: ExampleStream) -> None:
    """Half of the pieces run out of memory first, after their backward pass."""
    batch = next(stream.batches(8))
    whole, alone = made(run)
    whole(batch)

    class Short(MicroStep):
        def _backward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses = super()._backward(batch)
            if len(batch) > 2:
                torch.empty(1 << 60, dtype=torch.uint8)
            return losses

    step, collaboration = made(run)
    step.__class__ = Short
    MicroBatches(step, 8, lambda event: None)(batch)
    assert collaboration.sums.samples == 8 and collaboration.about.micro_batch == 2
    assert collaboration.sums.new.loss == pytest.approx(alone.sums.new.loss, rel=1e-5)
    assert collaboration.sums.new.figures == pytest.approx(alone.sums.new.figures, rel=1e-5)
    for name, expected in alone.sums._sums.items():
        torch.testing.assert_close(collaboration.sums._sums[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("place", ["gradient", "norm", "loss", "figure"])
def test_what_is_not_finite_is_not_counted_in(run: RunConfig, stream: ExampleStream, place: str) -> None:
    step, collaboration = made(run)

    class Damaged(MicroStep):
        def _backward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, figures = super()._backward(batch)
            if place in ("gradient", "norm"):
                next(iter(self.gradients().values())).fill_(float("nan") if place == "gradient" else 1e38)
            elif place == "loss":
                loss = loss / 0
            else:
                figures["text_loss"] = figures["text_loss"] * float("inf")
            return loss, figures

    batch = next(stream.batches(2))
    step.__class__ = Damaged
    assert not step(batch) and collaboration.sums.samples == 0
    step.__class__ = MicroStep
    assert step(batch) and collaboration.sums.samples == 2

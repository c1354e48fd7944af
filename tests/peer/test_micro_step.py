"""One micro-batch of a real model: tried out, interrupted, and counted in once."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testbed.tiny_words import tiny_words
from torch import nn

from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.peer.device import Device
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.peer.trained_state import TrainedState
from tt_cli.peer.trainer import MicroStep, each_until
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Event
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.shared_state import LockedState
from tt_cli.task import task_of

CPU, HALF = (Device(torch.device("cpu"), "a CPU", dtype) for dtype in (None, torch.float16))


class Collaboration:
    """Sums gradients, as the real one does."""

    state, epoch = SimpleNamespace(fresh=False), 0

    def __init__(self, model: nn.Module):
        self.told = list[Event]()
        self.emit = self.told.append
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


def made(run: RunConfig, device: Device = CPU) -> tuple[MicroStep, Collaboration]:
    task = task_of(run)
    model = task.new_model()
    collaboration = Collaboration(model)
    return MicroStep(task, model, device, collaboration, None), collaboration  # type: ignore[arg-type]


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


def test_a_backup_between_a_step_and_the_next_micro_batch_keeps_no_parameters_from_the_model(run: RunConfig) -> None:
    """Steps that take a minute would else never reach the device: a backup is due after each."""
    plain, collaboration = made(run)
    shared = TrainedState(run, plain.task.new_model(), None)
    collaboration.state = state = LockedState(shared)  # type: ignore[assignment]
    step = MicroStep(plain.task, plain.model, CPU, collaboration, shared)  # type: ignore[arg-type]
    step.renew()
    for _ in range(2):
        state.step({name: torch.ones(shape) for name, shape in shared.shapes().items()})
        with state.use():
            shared.snapshot()
        step.renew()
        theirs = shared.state().parameters
        assert all(torch.equal(own, theirs[name]) for name, own in plain.model.named_parameters())


def test_who_waits_leaves_no_batch_out() -> None:
    computed = iter([False, False, True, True, False, True])
    assert list(islice(each_until(lambda: next(computed), iter("abcd")), 6)) == [*"aaabcc"]


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


def in_fp16(**times: float) -> tuple[float, list[str]]:
    """How far a language model's worst gradient is from fp32's, of its norm, and what was told.

    times: module → times which its weights are the first ones.
    """
    found = []
    for device in (CPU, HALF):
        step, collaboration = made(tiny_words(tie_word_embeddings=False), device)
        with torch.no_grad():
            for name, module in step.model.named_modules():
                if (factor := times.get(name.rpartition(".")[2])) is not None:
                    module.weight.mul_(factor)
        assert step(next(step.task.examples(0).batches(8))) and collaboration.sums.samples == 8
        found.append(collaboration.sums._sums)
    right, own = found
    worst = max(float((own[name] - gradient).norm() / gradient.norm()) for name, gradient in right.items())
    return worst, [str(event) for event in collaboration.told]


@pytest.mark.parametrize(
    "times",
    [{}, {"lm_head": 1e-4}, {"lm_head": 1e5, "norm": 1e-4}],
    ids=["usual gradients", "small ones", "some overflow at first"],
)
def test_fp16_gives_the_gradients_of_fp32(times: dict[str, float]) -> None:
    worst, told = in_fp16(**times)
    assert worst < 0.03 and not told


def test_a_model_that_fp16_does_not_hold_is_computed_in_fp32() -> None:
    worst, told = in_fp16(down_proj=1e7)
    assert worst < 1e-5 and len(told) == 1 and "fp16 does not hold what this model computes" in told[0]

"""The training peer of tests and benchmarks: a real one that differs in what its options say, and in nothing else.

Options are the trainer's, and those of `Differences`. Without any it is patient: it waits for the others once
it has computed a whole step's samples by itself. Many peers share few cores in tests, and a tiny model's step is mostly
waiting: a peer that computes on meanwhile, as one with a device of its own should, keeps the others from starting and
from hearing each other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from testbed.attacks.member import COPIED, attacking, speaking_for
from testbed.conduct import Conduct, ConductedAverager
from testbed.faults import DAMAGE, DEVICE, NOT_FINITE, DueFaults, FaultyState, break_device, conduct_of
from tt_cli.data.examples import Batch
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.peer import backup, trainer
from tt_cli.peer.health import memory_watch
from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.run import DalleRun, RunConfig
from tt_cli.supervisor.events import Emit, Event, Step, Synchronised
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.collaboration import Collaboration, NetworkAccess
from tt_cli.swarm.compression import gradient_buffer
from tt_cli.task import task_of
from tt_cli.task.dalle_task import DalleTask
from tt_cli.task.task import Task

WAIT_SECONDS = 0.1
LOOK_SECONDS = 1.0  # how soon a peer in lockstep notices that it should leave
SMALL_PART = 4096  # elements


@dataclass(frozen=True)
class Differences:
    """How this peer differs from a volunteer's.

    pace: seconds that a micro-batch takes at least, as if each peer had a device of its own; on shared cores, one that
    leaves takes its own samples per second with it and nothing else changes. lockstep: it counts one micro-batch into
    each global step and waits for the step before the next one; with as many samples in the micro-batches of all peers
    as the target batch has, what the peers compute can be computed again elsewhere, to the last bit. longest: seconds
    after which one in lockstep computes one more micro-batch for the same step. gate: a file that must exist before the
    first one. patient: whether it waits as said above; None: unless it has a pace or goes in lockstep. random: examples
    are random, for runs whose data are not at hand.

    faults: see `Faults.of`. attacks: what it does wrong → from which step on; number: which of the attackers it is.
    victim: in whose name it publishes its records. small_parts: of averages, so that a tiny model has many; all members
    of a swarm must have them. short: of memory; {"step": 2, "fits": 2} asks for more than there is with more than two
    examples from step 2 on, {"step": 2, "leak": 40} keeps 40 MiB more after every micro-batch.
    """

    pace: float = 0.0
    lockstep: bool = False
    longest: float = math.inf
    gate: str | None = None
    patient: bool | None = None
    random: bool = False
    faults: list[tuple[int, str]] = field(default_factory=list)
    attacks: dict[str, int] = field(default_factory=dict)
    number: int = 0
    victim: str = ""
    small_parts: bool = False
    short: dict[str, int] = field(default_factory=dict)


class RandomExamples(ExampleStream):
    """Batches of the run's shapes without end, of no data."""

    def __init__(self, run: DalleRun):
        self.run = run

    def close(self) -> None:
        """There is nothing to end."""

    def batches(self, batch_size: int) -> Iterator[Batch]:
        run = DalleRun.of(self.run)
        while True:
            text = torch.randint(1, run.tokenizer.vocab_size, (batch_size, run.model.text_length))
            image = torch.randint(0, run.vqgan.codebook_size, (batch_size, run.vqgan.grid**2))
            yield Batch({"text": text, "image": image})


class RandomTask(DalleTask):
    """A run's task whose examples are these."""

    def prepare(self) -> None:
        """Nothing is read."""

    def examples(self, seed: int, **more: Any) -> ExampleStream:
        return RandomExamples(self.run)


def in_one_order(run: RunConfig) -> Task[Any]:
    """The run's task, with examples in an order that the seed alone decides: peers that share one have the same."""

    class OneOrder(type(task_of(run))):  # type: ignore[misc]
        def examples(self, seed: int, **more: Any) -> Any:
            return super().examples(seed, **{**more, "peer": ""})

    task: Task[Any] = OneOrder(run)
    return task


def different(mine: Differences, orders: Orders, news: threading.Condition) -> trainer.Parts:
    """What such a peer is made of. news: notified of every step."""
    patient = not (mine.pace or mine.lockstep) if mine.patient is None else mine.patient
    own_faults, leaked = DueFaults(mine.faults, own=True), list[bytes]()
    copied, came = COPIED in mine.attacks, list[Batch]()

    class DifferentMicroStep(trainer.MicroStep):
        """Paced, in lockstep, patient, short of memory, or with gradients that are not finite."""

        _spoiled = -1  # the step whose gradients are

        def __call__(self, batch: Batch) -> bool:
            collaboration = self.collaboration
            if patient and collaboration._accumulator.samples >= collaboration.run.swarm.target_batch_size:
                if collaboration.run.optimizer.name == "local":
                    self.renew()  # the next round waits for it
                collaboration.stand_by()
                time.sleep(WAIT_SECONDS)
                return True
            while mine.gate is not None and not Path(mine.gate).exists() and not orders.leave.is_set():
                orders.leave.wait(WAIT_SECONDS)
            step, began = collaboration.epoch, time.monotonic()
            if copied:  # the same for each step, however many micro-batches each of them computes
                came.append(batch)
                batch = came[min(step, len(came) - 1)]
            finite = super().__call__(batch)
            if mine.lockstep:
                self._wait_for_step(step, began + mine.longest)
            return finite

        def _wait_for_step(self, step: int, until: float) -> None:
            lifelines = Lifelines(self.collaboration.averager)
            with news:
                while self.collaboration.epoch == step and not orders.leave.is_set() and time.monotonic() < until:
                    news.wait(min(until - time.monotonic(), LOOK_SECONDS))
                    lifelines.check()

        def gradients(self) -> dict[str, torch.Tensor]:
            gradients, step = super().gradients(), self.collaboration.epoch + 1
            if own_faults.take(step, NOT_FINITE):
                self._spoiled = step
            for gradient in gradients.values() if step == self._spoiled else ():
                gradient.fill_(float("nan"))
            return gradients

        def _backward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            due = time.monotonic() + mine.pace
            if own_faults.take(self.collaboration.epoch + 1, DEVICE):
                break_device(self.device.torch_device)
            losses = super()._backward(batch)
            if mine.short and self.collaboration.epoch + 1 >= mine.short["step"]:
                if len(batch) > mine.short.get("fits", len(batch)):
                    torch.empty(1 << 60, dtype=torch.uint8)  # of the real allocator, amid the backward pass
                leaked.append(b"x" * (mine.short.get("leak", 0) << 20))
            orders.leave.wait(max(0.0, due - time.monotonic()))
            return losses

    class Averager(ConductedAverager):
        """Fails, or attacks, in some rounds. Of this name, for hivemind calls other peers by the name of the class."""

        faults = DueFaults(mine.faults, own=False)

        def conduct(self, step: int) -> Conduct:
            return conduct_of(self.faults.take(step) or self._attack(step), mine.number, self.faults)

        def leading(self, step: int) -> Conduct:
            return conduct_of(self._attack(step), mine.number, self.faults)

        @staticmethod
        def _attack(step: int) -> str:
            return next((attack for attack, first in reversed(mine.attacks.items()) if first <= step), "")

    class DifferentState(FaultyState):
        """In memory that is damaged."""

        faults = own_faults

    class DifferentCollaboration(Collaboration):
        """With these."""

        state_type = DifferentState

        def __init__(self, run: RunConfig, network: NetworkAccess, *rest: Any, **more: Any):
            super().__init__(run, replace(network, averager=Averager), *rest, **more)

    collaboration = attacking(DifferentCollaboration, mine.attacks, mine.number)
    if mine.victim:
        collaboration = speaking_for(collaboration, mine.victim)
    task = RandomTask if mine.random else in_one_order if copied else task_of
    return trainer.Parts(DifferentMicroStep, collaboration, task)


def main(options: dict[str, Any], emit: Emit, orders: Orders, **parts: Any) -> None:
    """As a training peer's. parts: others that it is made of."""
    mine = Differences(**{each.name: options.pop(each.name) for each in fields(Differences) if each.name in options})
    news = threading.Condition()

    def noting(event: Event) -> None:
        emit(event)
        if isinstance(event, (Step, Synchronised)):
            with news:
                news.notify_all()

    if mine.small_parts:
        gradient_buffer.PART_ELEMENTS = SMALL_PART
    if any(stage == DAMAGE for _, stage in mine.faults):
        backup.BACKUP_SECONDS = 0.0
    if mine.short:
        memory_watch.LOOK_SECONDS = 0.1  # a test need not wait
    trainer.main(options, noting, orders, replace(different(mine, orders, news), **parts))

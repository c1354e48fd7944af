"""A simulated swarm that trains a run's task for real, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch
from simulation.machine import Machine
from simulation.network import Line, Network
from simulation.virtual import in_virtual_time

from tt_cli.peer.device import Device
from tt_cli.peer.local_steps import LocalSteps
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.peer.trained_state import TrainedState
from tt_cli.peer.trainer import MicroStep
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Step
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.task import task_of


class Trainer(Machine):
    """A simulated machine that computes what a trainer computes."""

    micro_batch = 1
    local: LocalSteps | None = None

    def accumulator(self) -> Accumulator | None:
        self.model = task_of(self.run).new_model()
        if self.run.optimizer.name == "local":
            self.local = LocalSteps(self.run, self.model, self.state, lambda event: None)
        return self.local

    def _train(self) -> None:
        try:
            task, device = task_of(self.run), Device(torch.device("cpu"), "a CPU", None)
            collaboration: Any = self.collaboration
            step = MicroStep(task, self.model, device, collaboration, self.state, self.local)
            batches = MicroBatches(step, self.micro_batch, lambda event: None)
            collaboration.synchronise()
            for batch in task.examples(0, peer=self.name).batches(self.micro_batch):
                self.clock.sleep(self._pace)
                if self.process.dead or collaboration.finished:
                    return
                if collaboration.ready:
                    batches(batch)
                else:
                    collaboration.stand_by()
        except Exception as error:
            self.error = error


def trained(run: RunConfig, *, members: int, micro_batch: int) -> tuple[list[float], set[str]]:
    """Losses of the steps to the run's last, and digests of the state there."""
    return in_virtual_time(_trained(run, members, micro_batch))


async def _trained(run: RunConfig, members: int, micro_batch: int) -> tuple[list[float], set[str]]:
    losses, last, steps = dict[int, float](), set[str](), run.schedule.total_steps

    def watch(machine: Machine, step: Step, alone: bool) -> None:
        losses[step.epoch] = step.loss if step.loss is not None else losses.get(step.epoch - 1, 0.0)
        if step.epoch == steps:
            last.add(step.digest)

    def state(backup: Any) -> TrainedState:
        return TrainedState(run, task_of(run).new_model(), None)

    network = Network(random.Random(0), Line(), (), {})
    machines = [Trainer(network, number, run, watch, state=state) for number in range(members)]
    for machine in machines:
        machine.micro_batch = micro_batch
        machine.start()
    while steps not in losses:
        await asyncio.sleep(0.5)
        for machine in machines:
            if machine.error is not None:
                raise machine.error
    await asyncio.sleep(5.0)
    for machine in machines:
        machine.kill()
    return [losses[step] for step in sorted(losses)], last

"""Outer rounds of members that make local steps, over a virtual network with faults: what they hold, to the bit.

The members are whole machines (machine.py) with the real `LocalSteps` and `TrainedState` of a model of two layers.
Each is drawn to parameters of its own. One of the first three accepts no connections; of the others one is killed and
begins anew with first weights, one comes later, and messages are lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from peer.states import layers
from simulation.machine import SAMPLES, Machine, run_of
from simulation.network import Line, Network
from simulation.virtual import in_virtual_time

from tt_cli.peer.local_steps import LocalSteps
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Step
from tt_cli.swarm.compression.accumulator import Accumulator

MEMBERS, INNER_STEPS, WIDTH, LOSS = 5, 3, 24, 0.002
CLIENT, KILLED, JOINER = 2, 3, 4
GENTLE = "centered_clip"


class LocalMachine(Machine):
    """A member whose loss is half the square of its distance from parameters of its own."""

    def accumulator(self) -> Accumulator:
        self._model, self._goal = layers(0, WIDTH), dict(layers(self.number + 1, WIDTH).named_parameters())
        self._steps = LocalSteps(self.run, self._model, self.state, lambda event: None)
        return self._steps

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor]:
        self._steps.renew(self.collaboration.state)
        return {name: own - self._goal[name] for name, own in self._model.named_parameters()}


class Held:
    """What members hold after each step. differing: bits in which one differs from who made that step first."""

    def __init__(self) -> None:
        self.first: dict[int, np.ndarray] = {}
        self.made, self.differing, self.alone = defaultdict[int, set[int]](set), 0, 0

    def __call__(self, machine: Machine, step: Step, alone: bool) -> None:
        parameters = machine.state.state().parameters.values()
        bits = torch.cat([tensor.view(-1) for tensor in parameters]).numpy().view(np.uint8)
        there = self.first.setdefault(step.epoch, bits)
        self.differing += int(np.unpackbits(there ^ bits).sum())
        self.made[step.epoch].add(machine.number)
        self.alone += alone

    @property
    def top(self) -> int:
        return max(self.made, default=0)


def local_run(sparse: int, delayed: bool = False) -> RunConfig:
    optimizer = {"name": "local", "inner_batch": SAMPLES, "sparse": sparse, "delayed": delayed}
    target = INNER_STEPS * SAMPLES * (MEMBERS - 1)
    changes = {"optimizer": optimizer, "swarm.target_batch_size": target, "schedule.peak_lr": 1e-3}
    return run_of(MEMBERS, GENTLE).replaced(changes)


async def _rounds(rounds: int, run: RunConfig, seed: int) -> Held:
    network, held = Network(random.Random(seed), Line(loss=LOSS), (), {}), Held()

    def state(backup: Any) -> TrainedState:
        return TrainedState(run, layers(0, WIDTH), None)

    machines = [
        LocalMachine(network, number, run, held, state=state, client=number == CLIENT, pace=0.3 + 0.1 * number)
        for number in range(MEMBERS)
    ]

    async def until(step: int) -> None:
        while held.top < step:
            await asyncio.sleep(0.5)
            for machine in machines:
                if machine.error is not None:
                    raise machine.error

    for machine in machines[:JOINER]:
        machine.start()
    await until(rounds // 4)
    machines[JOINER].start()
    await until(rounds // 2)
    machines[KILLED].kill()
    await until(rounds // 2 + rounds // 10)
    machines[KILLED].start()
    await until(rounds)
    for machine in machines:
        machine.kill()
    return held


def measure(rounds: int, seed: int = 0) -> dict[str, Any]:
    """bits_differing, over all arms; of each how many members made a step that another one made.

    Messages are dense or sparse; "delayed" is sparse, with inner steps beside the rounds.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"bits_differing": 0, "outer_rounds": rounds}
    for arm, *settings in (("dense", 0), ("sparse", 64), ("delayed", 64, True)):
        held = in_virtual_time(_rounds(rounds, local_run(*settings), seed))
        figures["bits_differing"] += held.differing
        figures[f"{arm}_steps_compared"] = sum(len(made) - 1 for made in held.made.values())
        figures[f"{arm}_steps_alone"] = held.alone
        figures[f"{arm}_steps_of"] = [sum(number in made for made in held.made.values()) for number in range(MEMBERS)]
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))

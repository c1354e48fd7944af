"""A training peer with faults in chosen rounds, keyed by the peer's name and the step that the round makes.

TT_TEST_FAULTS: JSON, name → step → fault. Each fault happens once, in the first round towards that step or a later one:

dies before / amid / after   the whole peer is killed before it sends any average, after the first, after all of them
dies sending                 the whole peer is killed after the first part of its own gradient
commit lost                  no word about what arrived leaves or reaches it
unlike averages              the first of the other members is sent other bytes than the rest
waits for PATH               it reduces nothing until that file exists
bit flipped                  one bit of a parameter changes before the step is made
memory damaged               a parameter is not finite before the step is made; this peer writes backups all the time

Parts are small, so that a tiny model has many.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from end_to_end import patient_peer
from hivemind.averaging.group_info import GroupInfo
from hivemind.proto import averaging_pb2

from tt_cli.peer import backup, trainer
from tt_cli.peer.trained_state import TrainedState
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression import gradient_buffer

gradient_buffer.PART_ELEMENTS = 1024
FAULTS: dict[str, dict[str, str]] = json.loads(os.environ["TT_TEST_FAULTS"])
DAMAGES = ("bit flipped", "memory damaged")
mine: dict[str, str] = {}


def die() -> None:
    """As if the machine lost its power: every process of this peer at once."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


class FaultyRunner:
    """Puts one fault into the two sides of one round."""

    def __init__(self, fault: str, commit: CommitProtocol):
        allreduce = commit.allreduce
        self.fault, self.allreduce, self.commit = fault, allreduce, commit
        self.served = 0
        self.all_served = asyncio.Event()
        self.answer_round, self.outgoing = allreduce.rpc_aggregate_part, allreduce._outgoing
        allreduce.rpc_aggregate_part = self.rpc_aggregate_part  # type: ignore[method-assign]
        if fault == "dies sending":
            allreduce._outgoing = self.dying_outgoing  # type: ignore[method-assign]
        if fault == "dies after":
            commit.run = self.dying_settlement  # type: ignore[method-assign]
        if fault == "commit lost":
            commit._ask = self.nothing_leaves  # type: ignore[method-assign]
            commit.answer = self.nothing_arrives  # type: ignore[method-assign]

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        if self.fault == "dies before":
            die()
        if self.fault.startswith("waits for "):
            path = Path(self.fault.removeprefix("waits for "))
            while not path.exists():
                await asyncio.sleep(0.05)
        others = [member for member in self.allreduce.members if member != self.allreduce.me]
        sent = 0
        async for message in self.answer_round(stream, context):
            if self.fault == "unlike averages" and context.remote_id == others[0]:
                lie = averaging_pb2.AveragingData(code=message.code, tensor_part=message.tensor_part)
                lie.tensor_part.buffer = lie.tensor_part.buffer[:-1] + bytes([lie.tensor_part.buffer[-1] ^ 1])
                yield lie
                continue
            yield message
            sent += 1
            if self.fault == "dies amid":
                die()
            if sent == len(self.allreduce.reducer.parts):
                self.served += 1
                if self.served == len(others):
                    self.all_served.set()

    async def dying_outgoing(self, indexes: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in self.outgoing(indexes):
            yield message
            die()

    async def dying_settlement(self) -> None:
        await self.all_served.wait()
        die()

    async def nothing_leaves(self, *_: Any) -> None:
        """All attempts were in vain."""

    async def nothing_arrives(self, *_: Any) -> None:
        raise ConnectionError("lost on the way")


def begin(averager: Averager, group_info: GroupInfo, weight: float) -> CommitProtocol:
    """As the averager's, with the fault of this step in it."""
    commit = honest_begin(averager, group_info, weight)
    step = int(averager._plan.state_key.split("_")[0]) + 1
    if due := [key for key in mine if int(key) <= step and mine[key] not in DAMAGES]:
        FaultyRunner(mine.pop(due[0]), commit)
    return commit


def step(state: TrainedState, gradients: Any) -> Any:
    """As the state's, on memory that is damaged before it."""
    if due := [key for key in mine if int(key) <= state.epoch + 1 and mine[key] in DAMAGES]:
        element = next(iter(state.state().parameters.values())).view(-1)[:1]
        if mine.pop(due[0]) == "bit flipped":
            element.view(torch.int32).bitwise_xor_(1)
        else:
            element.fill_(float("nan"))
    return honest_step(state, gradients)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As the trainer's."""
    mine.update(FAULTS.get(options["user"], {}))
    if "memory damaged" in mine.values():
        backup.BACKUP_SECONDS = 0.0
    trainer.main(options, emit, orders)


honest_begin, honest_step = Averager._begin, TrainedState.step
TrainedState.step = step  # type: ignore[method-assign]
Averager._begin = begin  # type: ignore[method-assign]
patient_peer.install()

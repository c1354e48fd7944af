"""What goes wrong with a peer at chosen steps: `Faults.fail_at(peer, step, stage)`, as in torchft's EventInjector.

Each fault happens once: in the first round towards that step or a later one, or at the first micro-batch for it.
What happens as a reducer answers is due until it does: who reduces nothing in a round, as a slow line may, is asked by
none.

die amid                    the whole peer is killed after it sent the first of its averages
die sending                 the whole peer is killed after the first part of its own gradient
drop commit                 no word about what arrived leaves or reaches it
drop precommit              no word about what a quorum voted for does
unlike averages             the first of the other members is sent other bytes than the rest
wait for PATH               it answers nobody until that file exists; PATH.awaited says that it waits
a name in ROUNDS            what that attacker does
not finite                  its gradients are not, as its own checks see, until the next step
flip a bit                  of a parameter, before the step is made
damage memory               a parameter is not finite before the step is made; this peer writes backups all the time
device error                its device fails amid a micro-batch, as a broken card does
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from testbed.attacks.rounds import ROUNDS
from testbed.conduct import Conduct, Messages
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.shared_state import LockedState, StepFacts

ANSWERING = ("die", "unlike averages", "wait for ")  # what these begin with happens only where others ask
NOT_FINITE, FLIP, DAMAGE, DEVICE = OWN = ("not finite", "flip a bit", "damage memory", "device error")


class Faults:
    """Which peer fails at which step, and how. none() in production."""

    def __init__(self) -> None:
        self._due: list[tuple[str, int, str]] = []

    @classmethod
    def none(cls) -> Faults:
        """Nothing goes wrong."""
        return cls()

    def fail_at(self, peer: str, step: int, stage: str) -> Faults:
        """One more. Returns self."""
        self._due.append((peer, step, stage))
        return self

    def of(self, peer: str) -> list[tuple[int, str]]:
        """What a peer's process is told: (step, stage)."""
        return [(step, stage) for name, step, stage in self._due if name == peer]


class DueFaults:
    """Those of one peer that have not happened, in a process of its own: each happens once."""

    def __init__(self, faults: Sequence[tuple[int, str]], own: bool):
        """own: what happens to its own memory, not in rounds."""
        self._left = sorted((step, stage) for step, stage in faults if (stage in OWN) == own)

    def take(self, step: int, *stages: str) -> str:
        """The one to happen now on the way to this step, "" for none. stages: which; any without."""
        for due in self._left:
            if due[0] <= step and (not stages or due[1] in stages):
                if not due[1].startswith(ANSWERING):
                    self._left.remove(due)
                return due[1]
        return ""

    def happened(self, stage: str) -> None:
        """One of those that are due until they happen did."""
        self._left.remove(next(due for due in self._left if due[1] == stage))


def break_device(device: torch.device) -> None:
    """Raise an error after which the device does nothing more; on a GPU a real one, by an index out of bounds."""
    if device.type == "cuda":
        torch.zeros(1, device=device)[torch.tensor([2], device=device)]
        torch.cuda.synchronize(device)
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def die() -> None:
    """As if the machine lost its power: every process of this peer at once."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


class FaultyConduct(Conduct):
    """One fault in the two phases of one round."""

    def __init__(self, stage: str, faults: DueFaults):
        self._stage, self._faults, self._told = stage, faults, False

    def _happens(self) -> None:
        if not self._told:
            self._faults.happened(self._stage)
        self._told = True

    async def sends(self, allreduce: AllReduce, indexes: Sequence[int], messages: Messages) -> Messages:
        async for message in messages:
            yield message
            if self._stage == "die sending":
                die()

    async def answers(self, allreduce: AllReduce, peer: PeerID, messages: Messages) -> Messages:
        if self._stage.startswith("wait for "):
            gate = Path(self._stage.removeprefix("wait for "))
            gate.with_suffix(".awaited").touch()
            self._happens()
            while not gate.exists():
                await asyncio.sleep(0.05)
        others = [member for member in allreduce.members if member != allreduce.me]
        async for message in messages:
            if self._stage == "unlike averages" and peer == others[0]:
                self._happens()
                lie = averaging_pb2.AveragingData.FromString(message.SerializeToString())
                lie.tensor_part.buffer = lie.tensor_part.buffer[:-1] + bytes([lie.tensor_part.buffer[-1] ^ 1])
                yield lie
                continue
            yield message
            if self._stage == "die amid":
                die()

    async def asks(self, commit: CommitProtocol, ask: Callable[[], Awaitable[None]]) -> None:
        if self._stage != "drop commit":  # else all attempts were in vain
            await ask()

    async def is_asked(
        self, commit: CommitProtocol, answer: Callable[[], Awaitable[runtime_pb2.ExpertInfo]]
    ) -> runtime_pb2.ExpertInfo:
        if self._stage == "drop commit":
            raise ConnectionError("lost on the way")
        return await answer()

    async def confirms(self, commit: CommitProtocol, member: PeerID, ask: Callable[[], Awaitable[None]]) -> None:
        if self._stage != "drop precommit":
            return await ask()
        await commit._take_signed((), str(member))

    async def is_confirmed(self, answer: Callable[[], Awaitable[tuple[bytes, ...]]]) -> tuple[bytes, ...]:
        if self._stage == "drop precommit":
            raise ConnectionError("lost on the way")
        return await answer()


def conduct_of(stage: str, number: int, faults: DueFaults) -> Conduct:
    """In the round of a fault, or of an attack; "" is honest. faults: what is due, of which one may happen."""
    if stage in ROUNDS:
        return ROUNDS[stage](number)
    return FaultyConduct(stage, faults) if stage else Conduct()


class FaultyState(LockedState):
    """The shared state in memory that is damaged before some steps."""

    faults = DueFaults((), own=True)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        if stage := self.faults.take(self.epoch + 1, FLIP, DAMAGE):
            with self._lock:
                trained: Any = self._shared
                element = next(iter(trained.state().parameters.values())).view(-1)[:1]
                if stage == FLIP:
                    element.view(torch.int32).bitwise_xor_(1)
                else:
                    element.fill_(float("nan"))
        return super().step(gradients)

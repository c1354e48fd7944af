"""A training peer that is poisoned in some steps.

TT_TEST_POISON: "local" (its gradients are NaN, as its own checks see) or "remote" (what it sends to the others is NaN).
"""

import os
from collections.abc import AsyncIterator, Sequence

import torch
from end_to_end.patient_peer import PatientMicroStep
from hivemind.proto import averaging_pb2

from tt_cli.peer import trainer
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.averager import Averager

POISONED_STEPS = (2, 3)


class PoisonedMicroStep(PatientMicroStep):
    """Keyed by the step, so that a failure reproduces."""

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = super().gradients()
        if self.collaboration.epoch in POISONED_STEPS:
            for gradient in gradients.values():
                gradient.fill_(float("nan"))
        return gradients


class PoisonedRunner(AllReduce):
    """Scales of large tensors and numbers of small ones are NaN on their way out."""

    async def _outgoing(self, indexes: Sequence[int]) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._outgoing(indexes):
            part = message.tensor_part
            blocks = -(-part.size[0] // self.codec.block)
            large = len(part.buffer) < 2 * part.size[0]
            part.buffer = b"\xc0\x7f" * blocks + part.buffer[2 * blocks :] if large else b"\x00\x7e" * part.size[0]
            yield message


def begin(averager, group_info, weight):  # type: ignore[no-untyped-def]
    """As the averager's, with an allreduce that poisons the rounds of some steps."""
    commit = honest_begin(averager, group_info, weight)
    if int(averager._plan.state_key.split("_")[0]) in POISONED_STEPS:
        commit.allreduce.__class__ = PoisonedRunner
    return commit


honest_begin = Averager._begin
if os.environ["TT_TEST_POISON"] == "remote":
    Averager._begin = begin
else:
    trainer.MicroStep = PoisonedMicroStep
main = trainer.main

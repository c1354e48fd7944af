"""A training peer whose gradients of some steps are NaN, and which sends them all the same when told to.

TT_TEST_POISON: "local" (its own check sees them) or "remote" (its checks are off: they reach the others).
"""

import os
import sys

import torch
from hivemind.proto import runtime_pb2

from tt_cli.peer import trainer
from tt_cli.supervisor.worker import run_worker
from tt_cli.swarm import collaboration
from tt_cli.swarm.codec import GradientCodec

POISONED_STEPS = (2, 3)


class PoisonedMicroStep(trainer.MicroStep):
    """Keyed by the step, so that a failure reproduces."""

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = super().gradients()
        if self.collaboration.epoch in POISONED_STEPS:
            for gradient in gradients.values():
                gradient.fill_(float("nan"))
        return gradients


def careless(codec: GradientCodec, tensor: torch.Tensor, large: bool) -> runtime_pb2.Tensor:
    """Encodes whatever comes: what is not finite as NaN, in scales or numbers."""
    if tensor.isfinite().all():
        return honest(codec, tensor, large)
    elements = tensor.numel()
    nan = b"\xc0\x7f" * -(-elements // codec.block) + bytes(elements) if large else b"\x00\x7e" * elements
    return codec.message(nan, elements, large)


honest = GradientCodec.encode_part
trainer.MicroStep = PoisonedMicroStep
if os.environ["TT_TEST_POISON"] == "remote":
    collaboration.all_finite = lambda gradients: True
    GradientCodec.encode_part = careless
sys.exit(run_worker(trainer.main))

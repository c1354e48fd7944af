"""A training peer whose gradients of some steps are NaN, and which sends them all the same when told to.

TT_TEST_POISON: "local" (its own check sees them) or "remote" (its checks are off: they reach the others).
"""

import os
import sys

import torch
from hivemind.compression import CompressionInfo, Float16Compression
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


def careless(
    codec: GradientCodec, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
) -> runtime_pb2.Tensor:
    """Encodes whatever comes; fp16 has a form for NaN."""
    chosen = codec.choose_compression(info) if tensor.isfinite().all() else Float16Compression()
    return chosen.compress(tensor, info, allow_inplace)


trainer.MicroStep = PoisonedMicroStep
if os.environ["TT_TEST_POISON"] == "remote":
    collaboration.all_finite = lambda gradients: True
    GradientCodec.compress = careless
sys.exit(run_worker(trainer.main))

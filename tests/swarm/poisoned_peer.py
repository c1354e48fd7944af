"""A training peer whose gradients of some steps are NaN, and which sends them all the same when told to.

TT_TEST_POISON: "local" (its own check sees them) or "remote" (the check is off: they reach the others).
"""

import os
import sys

import torch

from tt_cli.peer import trainer
from tt_cli.supervisor.worker import run_worker
from tt_cli.swarm import collaboration

POISONED_STEPS = (2, 3)


class PoisonedMicroStep(trainer.MicroStep):
    """Keyed by the step, so that a failure reproduces."""

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = super().gradients()
        if self.collaboration.epoch in POISONED_STEPS:
            for gradient in gradients.values():
                gradient.fill_(float("nan"))
        return gradients


trainer.MicroStep = PoisonedMicroStep
if os.environ["TT_TEST_POISON"] == "remote":
    collaboration.all_finite = lambda gradients: True
sys.exit(run_worker(trainer.main))

"""A real training peer that waits for the others once it has computed a whole step's samples by itself.

Many peers share a few cores in tests, and a tiny model's step is mostly waiting: a peer that computes on meanwhile, as
one with a device of its own should, keeps the others from starting and from hearing each other.
"""

from __future__ import annotations

import time
from typing import Any

from tt_cli.data.examples import Batch
from tt_cli.peer import trainer
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders

WAIT_SECONDS = 0.1


class PatientMicroStep(trainer.MicroStep):
    """Computes nothing while it holds the samples of a step."""

    def __call__(self, batch: Batch) -> bool:
        collaboration = self.collaboration
        if collaboration._accumulator.samples < collaboration.run.swarm.target_batch_size:
            return super().__call__(batch)
        collaboration.stand_by()
        time.sleep(WAIT_SECONDS)
        return True


def install() -> None:
    """Make this process's trainer such a one."""
    trainer.MicroStep = PatientMicroStep  # type: ignore[misc]


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As the trainer's."""
    install()
    trainer.main(options, emit, orders)

"""A training peer that runs out of memory, keyed by its name and the step it works towards.

TT_TEST_MEMORY: JSON, name → what happens:

{"step": 2, "fits": 2}     from that step on, more than 2 examples at a time ask for more memory than there is
{"step": 2, "leak": 40}    from that step on, it keeps 40 MiB more after every micro-batch

Memory is looked at often, so that a test need not wait.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from tt_cli.data.examples import Batch
from tt_cli.peer import trainer
from tt_cli.peer.health import memory_watch
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders

memory_watch.LOOK_SECONDS = 0.1
mine: dict[str, int] = {}
leaked: list[bytes] = []


class ShortMicroStep(trainer.MicroStep):
    """Asks the real allocator for too much, amid the backward pass; or keeps memory."""

    def _backward(self, batch: Batch) -> tuple[float, dict[str, float]]:
        losses = super()._backward(batch)
        if self.collaboration.epoch + 1 < mine.get("step", 10**9):
            return losses
        if len(batch.text) > mine.get("fits", 10**9):
            torch.empty(1 << 60, dtype=torch.uint8)
        leaked.append(b"x" * (mine.get("leak", 0) << 20))
        return losses


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As the trainer's."""
    mine.update(json.loads(os.environ["TT_TEST_MEMORY"]).get(options["user"], {}))
    trainer.main(options, emit, orders)


trainer.MicroStep = ShortMicroStep  # type: ignore[misc]

"""A real training peer whose micro-batches take a set time, as if each peer had a device of its own.

Peers that share a machine's cores slow each other down; paced, a peer that leaves takes its own samples per second with
it and nothing else changes. Options are the trainer's and `micro_batch_seconds`: a micro-batch that was
computed sooner waits until then.
"""

from __future__ import annotations

import time
from typing import Any

from tt_cli.peer import trainer
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Train as `tt_cli.peer.trainer.main` does, at a set pace."""
    seconds = options.pop("micro_batch_seconds")

    class PacedMicroStep(trainer.MicroStep):
        """Waits out the rest of each micro-batch's time."""

        def _backward(self, batch: Any) -> tuple[float, dict[str, float]]:
            due = time.monotonic() + seconds
            losses = super()._backward(batch)
            orders.leave.wait(max(0.0, due - time.monotonic()))
            return losses

    trainer.MicroStep = PacedMicroStep  # type: ignore[misc]
    trainer.main(options, emit, orders)

"""A training peer that counts one micro-batch into each global step, and waits for the step before the next one.

With as many samples in the micro-batches of all peers together as the target batch has, every step is made of the same
gradients in every run: what the peers compute can be computed again elsewhere, to the last bit.

Options are the trainer's, and, where somebody may not contribute as it should: `longest`, seconds after which
a peer computes one more micro-batch for the same step (default: never), and `gate`, a file that must exist before the
first one (default: none).
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.peer import trainer
from tt_cli.peer.backup import Backups
from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.peer.health.memory_watch import MemoryWatch
from tt_cli.peer.health.watchdog import ProgressWatchdog
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.supervisor.events import Emit, Event, Step, Synchronised
from tt_cli.supervisor.reporter import Orders

LOOK_SECONDS, GATE_SECONDS = 1.0, 0.1  # how soon it notices that it should leave, or begin
news = threading.Condition()


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As a training peer's."""
    longest, gate = options.pop("longest", math.inf), options.pop("gate", None)

    def noting(event: Event) -> None:
        emit(event)
        if isinstance(event, (Step, Synchronised)):
            with news:
                news.notify_all()

    def lockstep(
        step: trainer.MicroStep,
        batches: MicroBatches,
        memory_watch: MemoryWatch,
        watchdog: ProgressWatchdog,
        stream: ExampleStream,
        backups: Backups,
        orders: Orders,
    ) -> None:
        """In place of the training loop; writes no backups, watches neither memory nor micro-batches."""
        collaboration, lifelines = step.collaboration, Lifelines(step.collaboration.averager)
        while gate is not None and not Path(gate).exists() and not orders.leave.is_set():
            orders.leave.wait(GATE_SECONDS)
        for batch in stream.batches(batches.size):
            epoch, began = collaboration.epoch, time.monotonic()
            step(batch)
            with news:
                while collaboration.epoch == epoch and not orders.leave.is_set():
                    left = began + longest - time.monotonic()
                    if left <= 0:
                        break
                    news.wait(min(left, LOOK_SECONDS))
                    lifelines.check()
            if orders.leave.is_set() or collaboration.finished:
                return

    trainer._train = lockstep
    trainer.main(options, noting, orders)

"""A training peer that never comes to train: `where`, in its options, says where its start hangs."""

from __future__ import annotations

import threading
from typing import Any

from testbed.peer import RandomTask
from tt_cli.peer import assistant, trainer
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Emit, Phase
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.collaboration import Collaboration


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As a training peer's, up to a phase "waiting"."""
    where = options.pop("where")

    def hang() -> None:
        emit(Phase("waiting", "for ever"))
        threading.Event().wait()

    class Task(RandomTask):
        def __init__(self, run: RunConfig):
            super().__init__(run)
            if where != "syncing":
                hang()

    class Syncing(Collaboration):
        def synchronise(self) -> None:
            self._publish()
            self.board.start()
            while not self.board.told:
                self.board.fresh_view()
            hang()

    if where == "assisting":
        vars(assistant)["task_of"] = Task
        assistant.main(options, emit, orders)
    trainer.main(options, emit, orders, trainer.Parts(collaboration=Syncing, task=Task))

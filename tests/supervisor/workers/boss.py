"""A supervisor: `python -m workers.boss ACT LOG [FOLDER [KIND]]` supervises `workers.actor`, prints what it shows.

FOLDER: the run's folder, where others may ask it; without it, nobody can. KIND: "peer" or "aux-peer".
"""

from __future__ import annotations

import sys
from pathlib import Path

from tt_cli.supervisor.control import Control
from tt_cli.supervisor.events import Event, Log
from tt_cli.supervisor.household.limits import HouseholdLimits
from tt_cli.supervisor.peer_state import new_status
from tt_cli.supervisor.slot import TRAINER, claim_slot
from tt_cli.supervisor.supervise import supervise
from tt_cli.supervisor.worker_process import Worker


class Printer:
    def show(self, event: Event) -> None:
        print(event.to_json(), flush=True)


def start() -> Worker:
    worker = Worker("workers.actor", {"act": sys.argv[1]}, Path(sys.argv[2]))
    Printer().show(Log(str(worker.pid)))
    return worker


if __name__ == "__main__":
    if len(sys.argv) == 3:
        supervise(start, Printer())
    else:
        folder, kind = Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else TRAINER
        slot, limits = claim_slot(folder, kind), HouseholdLimits()
        status = new_status("emoji", folder.name, "trainer" if kind == TRAINER else "aux", 600, "0")
        with Control(slot, status, limits, by_hand=True) as control:
            supervise(start, Printer(), control, limits)

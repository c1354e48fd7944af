"""A supervisor: `python -m workers.boss ACT FOLDER KIND` supervises `workers.actor`, prints what it shows.

FOLDER: the run's folder, where others may ask it, and its log. KIND: "peer" or "aux-peer".
"""

from __future__ import annotations

import sys
from pathlib import Path

from tt_cli.supervisor.control import Control
from tt_cli.supervisor.events import Event, Log
from tt_cli.supervisor.household.limits import HouseholdLimits
from tt_cli.supervisor.peer_state import PeerState
from tt_cli.supervisor.slot import TRAINER, claim_slot
from tt_cli.supervisor.supervise import signals_raised, supervise
from tt_cli.supervisor.worker_process import Worker


def show(event: Event) -> None:
    print(event.to_json(), flush=True)


def start() -> Worker:
    worker = Worker("workers.actor", {"act": sys.argv[1]}, Path(sys.argv[2]) / "log")
    show(Log(str(worker.pid)))
    return worker


if __name__ == "__main__":
    folder, kind = Path(sys.argv[2]), sys.argv[3]
    role = "trainer" if kind == TRAINER else "aux"
    status = PeerState(run="emoji", identity=folder.name, role=role, total_steps=600)
    with signals_raised(), Control(claim_slot(folder, kind), status, HouseholdLimits(), by_hand=True) as control:
        supervise(start, show, control)

"""A supervisor: `python -m workers.boss ACT LOG` supervises `workers.actor`, prints its events as JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path

from tt_cli.supervisor.events import Event, Log
from tt_cli.supervisor.process import Worker
from tt_cli.supervisor.supervise import supervise


class Printer:
    def show(self, event: Event) -> None:
        print(event.to_json(), flush=True)


def start() -> Worker:
    worker = Worker("workers.actor", {"act": sys.argv[1]}, Path(sys.argv[2]))
    Printer().show(Log(str(worker.pid)))
    return worker


if __name__ == "__main__":
    supervise(start, Printer())

"""The publisher beside an auxiliary peer: a process of its own, for the run's folder, its history and the Hub."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tt_cli.auxiliary.history.writer import DATABASE, database_url
from tt_cli.auxiliary.publisher import Publisher, PublishingHistory
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Event, Log
from tt_cli.supervisor.reporter import Orders, run_worker
from tt_cli.supervisor.side_process import SideProcess


@dataclass(frozen=True)
class PublisherOptions:
    """What is handed to the process, beside the run (TOML text). Times in seconds, see Publisher.

    The Hub's token stays where Hugging Face's tools keep it; the database's URL is in the environment.
    """

    run: str
    every: float = 1800.0
    again: float = 30.0
    look: float = 5.0


def publisher_part(options: PublisherOptions, database: str, log: Path, show: Callable[[Event], None]) -> SideProcess:
    """The publisher, watched; without it the rest goes on. database: its URL, "" for the file in the run's folder."""
    module, environment = (
        "tt_cli.auxiliary.publisher_process",
        {DATABASE: database, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    return SideProcess("the publisher", module, asdict(options), log, show, needed=False, environment=environment)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: look until it is asked to leave."""
    opts = PublisherOptions(**options)
    run = RunConfig.from_toml(opts.run, "the run file")
    os.nice(10)  # hashing and sending wait for the rest

    def leave() -> None:
        orders.leave.wait()
        os._exit(0)  # in the middle of sending too: a commit is there whole or not at all

    threading.Thread(target=leave, daemon=True).start()

    def tell(words: str, level: str) -> None:
        emit(Log(words, level))

    history = PublishingHistory(database_url(folders.run_folder(run), os.environ.get(DATABASE, "")), run, tell)
    publisher = Publisher(run, history, tell, opts.every, opts.again)
    emit(Log(f"checkpoints go to {run.checkpoints.repository} on the Hub"))
    while not orders.leave.is_set():
        publisher.look()
        orders.leave.wait(opts.look)


if __name__ == "__main__":
    sys.exit(run_worker(main))

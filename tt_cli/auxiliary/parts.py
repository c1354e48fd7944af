"""The processes beside the coordinator: each is handed its options, is watched, and may end without the others.

A part is a module with `main(options, emit, orders)` that `run_worker` calls. It knows the run's folder and its
history, whose URL, with its password, is in the environment.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tt_cli.errors import TTError
from tt_cli.history.writer import DATABASE, database_url
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Event
from tt_cli.supervisor.side_process import SideProcess
from tt_cli.supervisor.worker_process import Worker

HEARTBEAT_SECONDS = 30.0
CHANGE_SECONDS = 3.0  # between two heartbeats that say different things
NO_THREADS = {"OMP_NUM_THREADS": "1"}  # the coordinator on the same machine must answer in time


@dataclass(frozen=True)
class Part:
    """One kind of process. name: begins what is told of it. environment: what it needs there beside the database.

    needed: see SideProcess.
    """

    name: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False

    def watched(
        self, options: Mapping[str, Any], log: Path, show: Callable[[Event], None], database: str = ""
    ) -> SideProcess:
        """The process, to be entered. database: the history's URL, "" for the file in the run's folder."""
        start = partial(Worker, self.module, dict(options), log, {DATABASE: database, **self.environment})
        return SideProcess(self.name, start, show, needed=self.needed)


AUTHORITY = Part("the authority", "tt_cli.auth.authority.authority_server", needed=True)
WEB_PAGE = Part("the web page", "tt_cli.auxiliary.web_process")
EVALUATOR = Part("the evaluator", "tt_cli.auxiliary.evaluator_process", NO_THREADS)
PUBLISHER = Part("the publisher", "tt_cli.auxiliary.publisher", {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
ASSISTANT_KEY = "assistant"  # the name of its key file
ASSISTANT = Part("the assistant", "tt_cli.peer.assistant", NO_THREADS)


def run_of(options: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The run that a part is for, and the URL of its history."""
    run = RunConfig.from_toml(options["run"], "the run file")
    return run, database_url(folders.run_folder(run), os.environ.get(DATABASE, ""))


class Heartbeat:
    """What a part does at the moment, for /health: a change soon, the same again every 30 s. write: takes it."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._last, self._last_at = "", -float("inf")

    def __call__(self, activity: str) -> None:
        now = time.monotonic()
        if now >= self._last_at + (HEARTBEAT_SECONDS if activity == self._last else CHANGE_SECONDS):
            self._last, self._last_at = activity, now
            with suppress(TTError):
                self._write(activity)


def remove_quietly(file: Path) -> None:
    """Remove what told others on this machine of this part while it ran."""
    with suppress(OSError):
        file.unlink(missing_ok=True)


def assistant_options(coordinator: Mapping[str, Any], port: int | None) -> dict[str, Any]:
    """The assistant's, from the coordinator's. port: by default the one after its, any free one where it has any.

    Its announced addresses are the coordinator's with that port; none where that is not known beforehand.
    """
    if port is None:
        port = coordinator["port"] + 1 if 0 < coordinator["port"] < 65535 else 0
    announced = [re.sub(r"/tcp/\d+", f"/tcp/{port}", address) for address in coordinator["announce"]] if port else []
    return {"run": coordinator["run"], "host": coordinator["host"], "port": port, "announce": announced}

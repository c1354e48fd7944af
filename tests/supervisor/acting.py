"""Starting the workers of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from tt_cli.supervisor.events import Event, from_json
from tt_cli.supervisor.worker_process import Worker

HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(map(str, (HERE, *HERE.parents[:2]))), "PYTHONUNBUFFERED": ""}
WAIT = 30.0  # seconds; an upper bound for a busy machine, never a measurement


def start_actor(act: str, folder: Path) -> Worker:
    """A real worker process that acts as workers/actor.py says; its log is `folder`/log."""
    return Worker("workers.actor", {"act": act}, folder / "log", ENVIRONMENT)


def all_events(worker: Worker) -> list[Event]:
    """Everything that it tells until its end."""
    return list(worker.events(timeout=WAIT))


def start_boss(act: str, folder: Path, kind: str = "peer", terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, of a run in `folder`; its standard output is a line for each event."""
    return subprocess.Popen(
        [sys.executable, "-m", "workers.boss", act, str(folder), kind],
        env={**os.environ, **ENVIRONMENT},
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(boss: subprocess.Popen[str], words: str) -> None:
    """Read what a supervisor prints, up to a line with these words."""
    assert boss.stdout is not None
    while words not in line_of(boss.stdout):
        pass


def next_event(boss: subprocess.Popen[str]) -> Event:
    """The next event that a supervisor prints."""
    assert boss.stdout is not None
    return from_json(line_of(boss.stdout))


def line_of(stream: IO[str]) -> str:
    line = stream.readline()
    assert line, "the supervisor has ended"
    return line

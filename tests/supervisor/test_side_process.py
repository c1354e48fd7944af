"""A part beside a peer: started again when it ends, each reason told once, ended with its peer."""

from __future__ import annotations

import queue
import signal
from pathlib import Path

import pytest
from supervisor.acting import WAIT, start_actor

from tt_cli.supervisor import side_process as room
from tt_cli.supervisor.events import Event, Log, Phase
from tt_cli.supervisor.side_process import SideProcess
from tt_cli.supervisor.worker_process import Worker


def test_a_part_is_started_again_and_each_reason_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AGAIN_SECONDS", (0.01, 3600.0, 0.01))
    monkeypatch.setattr(room, "STEADY_SECONDS", 0.0)
    monkeypatch.setattr(room, "LEAVE_SECONDS", 0.1)
    acts, workers, told = (
        iter(["error", "error", "tell", "tell", "stubborn"]),
        list[Worker](),
        queue.SimpleQueue[Event](),
    )

    def start() -> Worker:
        workers.append(start_actor(next(acts), tmp_path))
        return workers[-1]

    lines, phases = list[str](), 0
    with SideProcess("the part", start, told.put, needed=False):
        while phases < 3:
            event = told.get(timeout=WAIT)
            phases += isinstance(event, Phase)
            lines += [event.message] if isinstance(event, Log) and event.level == "error" else []
    assert lines == [
        "the part does not start: the disk is full: free some space; the rest goes on, and it is tried again",
        "the part ended (exit code 0); starting it again in 0 s",
        "the part ended (exit code 0); starting it again in 0 s",
    ]
    assert workers[-1].wait(WAIT) == -signal.SIGKILL, "it does not leave by itself"

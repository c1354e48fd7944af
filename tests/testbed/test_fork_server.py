"""A fork tells, prints and ends as a process does that was started the usual way."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervisor.acting import ENVIRONMENT, WAIT, all_events

from testbed.fork_server import Forked, ForkServer
from tt_cli.supervisor.worker_process import Worker


@pytest.fixture(scope="module")
def server() -> ForkServer:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("OMP_NUM_THREADS", "1")
        return ForkServer()


def acted(act: str, folder: Path, launch: Callable[..., Any]) -> tuple[object, ...]:
    folder.mkdir()
    worker = Worker("workers.actor", {"act": act}, folder / "log", ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, launch)
    assert isinstance(worker._process, subprocess.Popen if launch is subprocess.Popen else Forked)
    try:
        if act == "wait":
            assert next(worker.events(WAIT)).kind == "phase"
            worker.leave()
        events = [dataclasses.replace(event, at=0.0) for event in all_events(worker)]
        return events, worker.wait(WAIT), worker.log.read_text().splitlines()[:1]
    finally:
        worker.kill()


@pytest.mark.parametrize("act", ["tell", "wait", "usage", "die"])
def test_a_fork_is_what_a_new_process_is(server: ForkServer, act: str, tmp_path: Path) -> None:
    assert acted(act, tmp_path / "forked", server.launch) == acted(act, tmp_path / "started", subprocess.Popen)


def test_it_dies_with_a_kill_and_the_server_goes_on(server: ForkServer, tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    worker = Worker("workers.actor", {"act": "stubborn"}, tmp_path / "log", environment, server.launch)
    assert next(worker.events(WAIT)).kind == "phase" and os.getpgid(worker.pid) == worker.pid
    worker.kill()
    assert worker.wait(WAIT) == -9
    assert acted("tell", tmp_path / "next", server.launch)[1] == 0

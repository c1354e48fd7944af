"""A worker process: its events, its log, its ends, and those of what it started."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import queue
import signal
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervisor.acting import ENVIRONMENT, WAIT, all_events, next_event, start_actor, start_boss
from testbed.process_watch import ProcessWatch

from tt_cli.errors import TTError
from tt_cli.supervisor import worker_process as room
from tt_cli.supervisor.events import Event, Failure, Finished, Log, Phase, Step
from tt_cli.supervisor.local_swarm import LocalSwarm
from tt_cli.supervisor.processes import children_of
from tt_cli.supervisor.reporter import BUG_EXIT_CODE, WorkerBroken
from tt_cli.supervisor.worker_process import MOST_LOG, Worker

PR_SET_CHILD_SUBREAPER = 36


def test_events_arrive_in_order_until_the_worker_has_ended(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    worker = start_actor("tell", tmp_path)
    phase, log, step = all_events(worker)
    assert isinstance(phase, Phase) and phase.phase == "starting"
    assert isinstance(log, Log) and log.message == "second\nline, ß and \u2028"
    assert isinstance(step, Step) and step.epoch == 1
    assert worker.wait(WAIT) == 0
    assert worker.ended and worker.failure is None
    assert list(worker.events(timeout=0.0)) == []
    for thread in {*threading.enumerate()} - before:
        thread.join(WAIT)
        assert not thread.is_alive(), "a peer has many workers, one after the other"


def test_what_it_prints_goes_into_its_log_which_only_its_owner_reads(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of the worker before\n")
    worker = start_actor("tell", tmp_path)
    all_events(worker)
    worker.wait(WAIT)
    assert worker.log.read_text() == "of the worker before\na library's words\n"
    assert stat.S_IMODE(worker.log.stat().st_mode) == 0o600


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before a worker starts nor while it runs: one old one is kept."""
    looked, shorten = threading.Semaphore(0), room.shorten

    def told(log: Path) -> None:
        shorten(log)
        looked.release()

    monkeypatch.setattr(room, "shorten", told)
    monkeypatch.setattr(room, "LOG_SECONDS", 0.01)
    log, old = tmp_path / "log", tmp_path / "log.1"
    log.write_bytes(b"1" * (MOST_LOG + 1))
    worker = start_actor("wait", tmp_path)
    assert old.read_bytes() == b"1" * (MOST_LOG + 1) and log.read_bytes() == b""
    with log.open("ab", buffering=0) as writer:
        for number in (MOST_LOG, 2):
            assert old.read_bytes()[:1] == b"1"
            writer.write(b"2" * number)
            while looked.acquire(blocking=False):
                pass
            assert looked.acquire(timeout=WAIT) and looked.acquire(timeout=WAIT), "the second began after that"
        writer.write(b"3")
    assert log.read_bytes() == b"3" and old.read_bytes() == b"2" * (MOST_LOG + 2)
    assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE(log.stat().st_mode) == 0o600
    worker.kill()
    assert worker.wait(WAIT) == -signal.SIGKILL


def test_a_log_that_a_full_disk_keeps_from_being_shortened_is_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room.shutil, "copy", full)
    (tmp_path / "log").write_bytes(b"1" * (MOST_LOG + 1))
    worker = start_actor("tell", tmp_path)
    assert len(all_events(worker)) == 3 and worker.wait(WAIT) == 0
    assert worker.log.stat().st_size > MOST_LOG + 1


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TTError, match=r"cannot start a worker process .* No such file"):
        Worker("workers.actor", {}, tmp_path / "missing" / "log", ENVIRONMENT)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before)


@pytest.mark.parametrize(
    "asked",
    [Worker.leave, lambda worker: worker._process.stdin.close(), lambda worker: os.kill(worker.pid, signal.SIGTERM)],
    ids=["asked", "end of its input", "SIGTERM"],
)
def test_it_leaves_when_asked_and_asking_again_does_no_harm(asked: Callable[[Worker], None], tmp_path: Path) -> None:
    worker = start_actor("wait", tmp_path)
    assert next(worker.events(timeout=WAIT)).kind == "phase"
    os.kill(worker.pid, signal.SIGINT)  # a terminal sends it to all; the supervisor alone decides
    assert worker.exit_code is None and not worker.ended
    asked(worker)
    assert [type(event) for event in all_events(worker)] == [Finished]
    assert worker.wait(WAIT) == 0
    worker.leave()
    worker.kill()


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        ("error", 1, "the disk is full: free some space"),
        ("usage", 2, "run 'x' is unknown"),
        ("broken", WorkerBroken.exit_code, "the daemon was ended"),
        ("bug", BUG_EXIT_CODE, "RuntimeError: two plus two"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(act: str, code: int, words: str, tmp_path: Path) -> None:
    worker = start_actor(act, tmp_path)
    (failure,) = all_events(worker)
    assert isinstance(failure, Failure)
    assert worker.failure is failure
    assert (failure.message, failure.exit_code) == (words, code)
    assert worker.wait(WAIT) == code
    assert ("Traceback" in worker.log.read_text()) == (act == "bug")


@pytest.mark.parametrize(("act", "code", "last"), [("tell", 0, Step), ("error", 1, Failure), ("bug", 70, Failure)])
def test_a_worker_whose_log_lies_on_a_full_disk_ends_as_any_other(
    act: str, code: int, last: type[Event], tmp_path: Path
) -> None:
    """An end by Python's own way waits for threads of hivemind's, and has another exit code."""

    def launch(command: list[str], **named: Any) -> subprocess.Popen[bytes]:
        with open("/dev/full", "wb") as full:
            return subprocess.Popen(command, **{**named, "stdout": full, "stderr": full})

    worker = Worker("workers.actor", {"act": act}, tmp_path / "log", ENVIRONMENT, launch)
    assert type(all_events(worker)[-1]) is last
    assert worker.wait(WAIT) == code


def test_the_exit_code_of_a_killed_worker_is_its_signal(tmp_path: Path) -> None:
    worker = start_actor("die", tmp_path)
    assert all_events(worker) == []
    assert worker.wait(WAIT) == -signal.SIGKILL
    assert worker.failure is None


def test_waiting_has_a_limit_and_so_has_listening(tmp_path: Path) -> None:
    worker = start_actor("stubborn", tmp_path)
    next(worker.events(timeout=WAIT))
    worker.leave()
    assert list(worker.events(timeout=0.01)) == []
    assert worker.wait(0.01) is None
    worker.kill()
    assert worker.wait(WAIT) == -signal.SIGKILL


def test_one_that_still_loads_leaves_at_once(tmp_path: Path) -> None:
    worker = Worker("workers.loading", {}, tmp_path / "log", ENVIRONMENT)
    worker.leave()
    assert [event.kind for event in all_events(worker)] == ["finished"]
    assert worker.wait(WAIT) == 0


def family(told: Event) -> dict[str, int]:
    """The children that the act "family" told: {"forked": its process id, "executed": …}."""
    assert isinstance(told, Log)
    return json.loads(told.message)


@pytest.mark.parametrize("killed", [False, True])
def test_all_that_it_started_ends_with_a_worker(killed: bool, tmp_path: Path) -> None:
    worker = start_actor("family", tmp_path)
    watch = ProcessWatch(set(family(next(worker.events(timeout=WAIT))).values()))
    if killed:
        os.kill(worker.pid, signal.SIGKILL)
    else:
        worker.leave()
    assert watch.left_after(WAIT) == set()
    assert all_events(worker) == []  # the children held the pipe of events open
    assert worker.wait(WAIT) == (-signal.SIGKILL if killed else 0)


def test_the_first_process_of_a_container_keeps_none_of_the_dead(tmp_path: Path) -> None:
    """Without `docker run --init` that is a supervisor: what a killed worker leaves is its child then."""
    before, prctl = {*threading.enumerate()}, ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        worker = start_actor("family", tmp_path)
        children = set(family(next(worker.events(timeout=WAIT))).values())
        os.kill(worker.pid, signal.SIGKILL)
        for thread in {*threading.enumerate()} - before:
            thread.join(WAIT)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert children.isdisjoint(children_of(os.getpid()))


def test_the_worker_and_all_that_it_forked_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    boss = start_boss("family", tmp_path)
    try:
        started, children = next_event(boss), family(next_event(boss))
        assert isinstance(started, Log)
        worker = int(started.message)
        watch = ProcessWatch({worker, children["forked"]})
    finally:
        boss.kill()
        boss.communicate()
    assert watch.left_after(WAIT) == set()
    os.killpg(worker, signal.SIGKILL)  # what it executed lives on: the kernel forgets the wish at an exec
    assert ProcessWatch({children["executed"]}).left_after(WAIT) == set()


def test_a_member_of_a_local_swarm_that_is_killed_is_shown_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    with LocalSwarm("", tmp_path, lambda name, event: shown.put((name, event))) as swarm:
        for name, act in (("ann", "wait"), ("ben", "die"), ("cleo", "wait")):
            swarm.start(name, "workers.actor", {"act": act})
        events = [shown.get(timeout=WAIT) for _ in range(3)]
        assert [(name, event.message) for name, event in events if isinstance(event, Failure)] == [
            ("ben", "ended by SIGKILL")
        ]
        swarm.leave("ann")
    assert not [event for _, event in drained(shown) if isinstance(event, Failure)], "cleo was ended by the swarm"


def test_a_local_swarm_that_nobody_watches_any_more_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tt demo | head`."""

    def show(name: str, event: Event) -> None:
        raise BrokenPipeError

    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    with LocalSwarm("", tmp_path, show) as swarm:
        swarm.start("ann", "workers.actor", {"act": "wait"})
        with pytest.raises(BrokenPipeError):
            swarm.wait(lambda: False, WAIT)


def drained(shown: queue.SimpleQueue[tuple[str, Event]]) -> list[tuple[str, Event]]:
    return [shown.get() for _ in range(shown.qsize())]

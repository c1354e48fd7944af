"""Keeping a worker running: restarts with a limit, final failures, Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from supervisor.acting import WAIT, next_event, start_actor, start_boss, until
from testbed.process_watch import ProcessWatch

from tt_cli.supervisor import supervise as room
from tt_cli.supervisor.control import Control
from tt_cli.supervisor.events import Event, Finished, Log, Phase
from tt_cli.supervisor.household.limits import HouseholdLimits
from tt_cli.supervisor.peer_state import PeerState, read_status
from tt_cli.supervisor.slot import TRAINER, claim_slot
from tt_cli.supervisor.supervise import Failed, signals_raised, supervise
from tt_cli.supervisor.worker_process import Worker


class Acts:
    """Starts one worker after the other, each with the next act."""

    def __init__(self, folder: Path, *acts: str) -> None:
        self.folder, self.acts = folder, list(acts)
        self.workers: list[Worker] = []

    def __call__(self) -> Worker:
        self.workers.append(start_actor(self.acts[len(self.workers)], self.folder))
        return self.workers[-1]


class Record:
    """A screen that remembers; `interrupt` says at which events Ctrl-C is pressed."""

    def __init__(self, interrupt: Callable[[Event], bool] = lambda event: False) -> None:
        self.events: list[Event] = []
        self._interrupt = interrupt

    def show(self, event: Event) -> None:
        self.events.append(event)
        if self._interrupt(event):
            raise KeyboardInterrupt

    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Log) and event.level == "warning"]


def keep(acts: Acts, screen: Record) -> None:
    """Supervise its workers in their folder."""
    status = PeerState(run="emoji", identity="emoji-1a2b3c4d", total_steps=600)
    with Control(claim_slot(acts.folder, TRAINER), status, HouseholdLimits(), by_hand=True) as control:
        supervise(acts, screen.show, control)


def test_a_worker_that_ends_by_itself_is_followed_to_its_end(tmp_path: Path) -> None:
    acts, screen = Acts(tmp_path, "tell"), Record()
    keep(acts, screen)
    assert [event.kind for event in screen.events] == ["phase", "log", "step"]


def test_a_crash_restarts_it_until_it_has_failed_three_times(tmp_path: Path) -> None:
    acts, screen = Acts(tmp_path, "die", "bug", "broken"), Record()
    with pytest.raises(Failed) as caught:
        keep(acts, screen)
    assert len(acts.workers) == 3
    assert caught.value.exit_code == 1
    assert str(caught.value) == (f"the daemon was ended; it failed 3 times in a row: see {tmp_path / 'log'}")
    assert screen.warnings() == [
        "the peer process was killed (signal 9); starting it again from its backup (1 of 2)",
        "RuntimeError: two plus two; starting it again from its backup (2 of 2)",
    ]


def test_a_global_step_between_crashes_starts_the_count_anew(tmp_path: Path) -> None:
    acts, screen = Acts(tmp_path, "die", "die", "step", "die", "tell"), Record()
    keep(acts, screen)
    counts = [words.rpartition("(")[2] for words in screen.warnings()]
    assert counts == ["1 of 2)", "2 of 2)", "1 of 2)", "2 of 2)"]


@pytest.mark.parametrize("act", ["wait", "late"])  # what it does after that is not shown
def test_ctrl_c_lets_it_leave(act: str, tmp_path: Path) -> None:
    acts = Acts(tmp_path, act)
    screen = Record(lambda event: isinstance(event, Phase) and event.phase == "training")
    keep(acts, screen)
    assert [event.kind for event in screen.events] == ["phase", "phase", "finished"]
    assert screen.events[1:] == [
        Phase("leaving", "Ctrl-C; once more ends it at once", at=screen.events[1].at),
        Finished("left", at=screen.events[2].at),
    ]
    assert acts.workers[0].wait(WAIT) == 0


def test_it_leaves_cleanly_where_nobody_reads_any_more(tmp_path: Path) -> None:
    """`tt join RUN | tee log`, whose `tee` ends: by itself, or by the Ctrl-C that is meant for both."""
    acts, told = Acts(tmp_path, "wait"), []

    def show(event: Event) -> None:
        told.append(event)
        if isinstance(event, Phase):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    status = PeerState(run="emoji", identity="emoji-1a2b3c4d", total_steps=600)
    with Control(claim_slot(tmp_path, TRAINER), status, HouseholdLimits(), by_hand=True) as control:
        supervise(acts, show, control)
    assert [event.kind for event in told] == ["phase"], "what cannot be read is not told"
    assert (status.state, status.reason) == ("ended", "left")
    assert acts.workers[0].wait(WAIT) == 0


def test_it_goes_on_without_its_terminal(tmp_path: Path) -> None:
    """As after `disown`, or under nohup."""

    def show(event: Event) -> None:
        raise OSError(errno.EIO, "Input/output error")

    status = PeerState(run="emoji", identity="emoji-1a2b3c4d", total_steps=600)
    with Control(claim_slot(tmp_path, TRAINER), status, HouseholdLimits(), by_hand=True) as control:
        supervise(Acts(tmp_path, "tell"), show, control)
    assert (status.state, status.reason, status.step) == ("ended", "", 1), "it was not asked to leave"


def test_signals_mean_leave_unless_they_are_ignored() -> None:
    usual, before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"), signals_raised():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == (usual, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_that_ends_the_reader_too(tmp_path: Path) -> None:
    boss = start_boss("obey", tmp_path)
    try:
        until(boss, '"training"')
        assert boss.stdout is not None
        boss.stdout.close()
        boss.send_signal(signal.SIGINT)
        boss.wait(WAIT)
    finally:
        boss.kill()
    status = read_status(tmp_path / "peer.json")
    assert status is not None
    assert (status.state, status.reason, status.saved_step) == ("ended", "left", 5)


@pytest.mark.parametrize("act", ["stubborn", "chatty"])  # what it tells does not stretch the time
def test_one_that_does_not_leave_is_ended_after_a_while(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.02)
    acts = Acts(tmp_path, act)
    screen = Record(lambda event: isinstance(event, Phase) and event.phase == "training")
    keep(acts, screen)
    assert isinstance(screen.events[-1], Finished) and "hard way" in screen.events[-1].reason
    assert acts.workers[0].wait(WAIT) == -signal.SIGKILL


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """Real signals to a real supervisor; the worker is one that never leaves."""
    boss = start_boss("stubborn", tmp_path)
    try:
        started, training = next_event(boss), next_event(boss)
        assert isinstance(started, Log) and isinstance(training, Phase)
        watch = ProcessWatch({int(started.message)})
        os.kill(boss.pid, signal.SIGINT)
        leaving = next_event(boss)
        assert isinstance(leaving, Phase) and leaving.phase == "leaving"
        os.kill(boss.pid, signal.SIGINT)
        output, errors = boss.communicate(timeout=WAIT)
    finally:
        boss.kill()
    assert watch.left_after(WAIT) == set()
    assert errors == ""
    assert boss.returncode == 0
    assert "ended at once" in output

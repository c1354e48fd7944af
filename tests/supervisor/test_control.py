"""Pausing, resuming, finishing and watching a running peer through its socket; what outlives it."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor.acting import ENVIRONMENT, WAIT, start_actor, start_boss, until

from tt_cli.errors import TTError
from tt_cli.supervisor import supervise as room
from tt_cli.supervisor.control import Control
from tt_cli.supervisor.control_socket import NoAnswer, NotRunning, answering, ask
from tt_cli.supervisor.events import Event, Finished, Log, Phase, Saved, Step
from tt_cli.supervisor.household.limits import GO_ON, HouseholdLimits, Origin, Verdict
from tt_cli.supervisor.peer_state import PeerState, read_status
from tt_cli.supervisor.slot import AUX, TRAINER, Slot, claim_slot, look_at, slots_in
from tt_cli.supervisor.supervise import Failed, supervise
from tt_cli.supervisor.worker_process import Worker

pytestmark = pytest.mark.slow


class Told:
    """A limit that says what the test wants."""

    origin = Origin("told", "", "--told")

    def __init__(self, verdict: Verdict = GO_ON) -> None:
        self.verdict = verdict

    def announced(self) -> Event:
        return Log("told by the test")

    def look(self, now: float) -> Verdict:
        return self.verdict


class Peer:
    """A supervisor in a thread of this process, its workers, and all that it shows."""

    def __init__(self, folder: Path, *acts: str, by_hand: bool = True, kind: str = TRAINER, limit: Told | None = None):
        self.folder, self.acts = folder, list(acts)
        self.events: list[Event] = []
        self.workers: list[Worker] = []
        self.error: BaseException | None = None
        self._news = threading.Condition()
        self.limits = HouseholdLimits([limit] if limit else [])
        self.slot = claim_slot(folder, kind)
        role = "trainer" if kind == TRAINER else "aux"
        self.status = PeerState(run="emoji", identity="emoji-1a2b3c4d", role=role, total_steps=600)
        self.control = Control(self.slot, self.status, self.limits, by_hand=by_hand)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        self.control.status.finish = True
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self.control:
                supervise(self._start, self.show, self.control)
        except BaseException as error:
            self.error = error
        assert self.slot.lock is not None
        self.slot.lock.close()

    def _start(self) -> Worker:
        self.workers.append(start_actor(self.acts[len(self.workers)], self.folder))
        return self.workers[-1]

    def show(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, condition: Callable[[list[Event]], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: condition(self.events), WAIT), self.events

    def wait_for_phase(self, phase: str, times: int = 1) -> Phase:
        self.wait_for(lambda events: len(self.phases(phase)) >= times)
        return self.phases(phase)[-1]

    def phases(self, phase: str) -> list[Phase]:
        return [event for event in self.events if isinstance(event, Phase) and event.phase == phase]

    def ask(self, command: str, **more: object) -> str:
        return str(ask(self.slot.socket, {"command": command, **more})["words"])

    def join(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, too deep for a Unix socket's address."""
    place = tmp_path / ("deep" * 30) / "runs" / "emoji-1a2b3c4d"
    place.mkdir(parents=True, mode=0o700)
    return place


def test_a_paused_peer_has_no_worker_and_goes_on_with_a_new_one(folder: Path) -> None:
    with Peer(folder, "obey", "obey") as peer:
        peer.wait_for_phase("training")
        assert peer.ask("pause") == "writes a backup, leaves the swarm and is paused until `tt resume`"
        assert peer.wait_for_phase("paused").reason == "until `tt resume`"
        assert peer.workers[0].exit_code == 0
        assert [event for event in peer.events if isinstance(event, Saved)]
        assert not [event for event in peer.events if isinstance(event, Finished)]
        seen = look_at(Slot(folder, "peer"))
        assert seen is not None and seen.running and seen.status.state == "paused" and seen.status.paused
        assert peer.ask("pause", seconds=3600).startswith("stays paused until ")
        assert peer.wait_for_phase("paused", 2).until is not None
        assert peer.ask("resume") == "starts again"
        peer.wait_for_phase("training", 2)
        assert peer.ask("resume") == "was not paused"
        assert peer.ask("finish") == "ends after its first step"
        peer.join()
    assert peer.error is None
    status = read_status(folder / "peer.json")
    assert status is not None and (status.state, status.reason, status.finish) == ("ended", "left", False)
    assert len(peer.workers) == 2


def test_a_pause_for_a_time_ends_by_itself(folder: Path) -> None:
    with Peer(folder, "obey", "obey") as peer:
        peer.wait_for_phase("training")
        peer.ask("pause")
        peer.wait_for_phase("paused")
        peer.ask("pause", seconds=0.3)
        peer.wait_for_phase("training", 2)
        assert not peer.control.status.paused


def test_finish_can_be_taken_back(folder: Path) -> None:
    with Peer(folder, "stubborn") as peer:
        peer.wait_for_phase("training")
        peer.ask("finish")
        peer.wait_for(lambda events: "ends after this step: `tt finish`" in messages(events))
        assert peer.ask("resume") == "goes on"
        peer.wait_for(lambda events: "goes on after this step: `tt resume`" in messages(events))
        assert not peer.control.status.finish


def messages(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Log)]


def test_a_limit_holds_the_worker_and_lets_it_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.supervisor.household.limits.LOOK_SECONDS", 0.02)
    limit = Told()
    with Peer(folder, "obey", limit=limit) as peer:
        peer.wait_for_phase("training")
        limit.verdict = Verdict("hold", "the GPU has 84 °C")
        peer.wait_for(lambda events: "hold: the GPU has 84 °C" in messages(events))
        waiting = peer.wait_for_phase("waiting", 2)  # the worker says "training" once more
        assert waiting.reason == "the GPU has 84 °C"
        assert len(peer.phases("training")) == 1
        limit.verdict = GO_ON
        assert peer.wait_for_phase("training", 2).reason in ("towards step 5", "towards step 6")
        limit.verdict = Verdict("pause", "until 23:00 (--hours 23:00-07:00)", time.time() + 3600)
        paused = peer.wait_for_phase("paused")
        assert (paused.reason, paused.until) == (limit.verdict.reason, limit.verdict.until)
        assert peer.ask("resume") == "stays paused: until 23:00 (--hours 23:00-07:00)"
        assert peer.ask("finish") == "ends now, for it is paused"
        peer.join()
    assert isinstance(peer.events[-1], Finished)
    assert peer.error is None and len(peer.workers) == 1


def test_a_peer_that_has_worked_is_paused_when_it_fails_and_tried_again(folder: Path) -> None:
    with Peer(folder, "step", "die", "die", "error", "obey") as peer:
        paused = peer.wait_for_phase("paused")
        assert "(signal 9); it failed 3 times in a row: see " in paused.reason
        assert "; tries again at " in paused.reason and "`tt resume` tries now" in paused.reason
        assert paused.until is not None and paused.until == pytest.approx(time.time() + room.RETRY_SECONDS[0], abs=WAIT)
        assert peer.control.status.restarts == 2
        assert peer.ask("resume") == "starts again"
        again = peer.wait_for_phase("paused", 2)  # what a restart does not mend pauses it too
        assert again.reason.startswith("the disk is full: free some space; tries again at ")
        assert again.until is not None and again.until > paused.until + 1800
        peer.ask("resume")
        peer.wait_for_phase("training")
    assert peer.error is None


def test_it_tries_again_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_SECONDS", (0.05,))
    with Peer(folder, "step", "die", "die", "die", "obey") as peer:
        peer.wait_for_phase("paused", 2)
        peer.wait_for_phase("training")
    monkeypatch.setattr(room, "RETRY_SECONDS", (0.05, 3600.0))
    with Peer(folder, "step", "error", "step", "error", "obey") as peer:
        peer.wait_for_phase("training")  # with a step between, the second failure is a first one
    limit = Told(Verdict("pause", "until 23:00"))
    with Peer(folder, "error", "obey", limit=limit) as peer:
        peer.wait_for_phase("paused")
        limit.verdict = peer.limits.verdict = GO_ON
        peer.wait_for_phase("training")  # nobody may be there who saw that it could not start


def test_an_aux_peer_that_has_worked_for_a_while_has_not_failed_in_a_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no steps: of three failures in weeks the third paused it, and each later one for hours."""
    monkeypatch.setattr(room, "STEADY_SECONDS", 0.0)
    with Peer(folder, *["serve"] * 5, "obey", kind=AUX) as peer:
        peer.wait_for_phase("training")
        assert not peer.phases("paused") and peer.control.status.restarts == 5
    monkeypatch.setattr(room, "STEADY_SECONDS", 3600.0)
    with Peer(folder, *["serve"] * 3, "obey", kind=AUX) as peer:
        peer.wait_for_phase("paused")


def test_a_peer_that_has_worked_and_is_given_no_process_tries_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[bool]()

    def refuse(*_: object, **__: object) -> None:
        refused.append(True)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    class Refused(Peer):
        def _start(self) -> Worker:
            if self.workers and not refused:
                return Worker("workers.actor", {}, self.folder / "log", ENVIRONMENT, refuse)
            return super()._start()

    monkeypatch.setattr(room, "RETRY_SECONDS", (0.05,))
    with Refused(folder, "step", "obey") as peer:
        paused = peer.wait_for_phase("paused").reason
        assert paused.startswith("cannot start a worker process ") and "temporarily unavailable; tries again" in paused
        peer.wait_for_phase("training")


def test_a_peer_that_ends_while_it_has_given_up_has_failed(folder: Path) -> None:
    with Peer(folder, "step", "error") as peer:
        peer.wait_for_phase("paused")
        peer.ask("finish")
        peer.join()
    assert isinstance(peer.error, Failed)
    assert (str(peer.error), peer.error.exit_code) == ("the disk is full: free some space", 1)


@pytest.mark.parametrize(
    ("acts", "code", "words"),
    [
        (("error",), 1, "the disk is full: free some space"),
        (("die", "die", "die"), 1, "the peer process was killed (signal 9); it failed 3 times in a row: see "),
        (("step", "usage"), 2, "run 'x' is unknown"),
    ],
)
def test_one_that_never_worked_or_was_asked_wrongly_fails_at_once(
    acts: tuple[str, ...], code: int, words: str, folder: Path
) -> None:
    with Peer(folder, *acts) as peer:
        peer.join()
    assert isinstance(peer.error, Failed) and peer.error.exit_code == code
    assert str(peer.error).startswith(words) and len(peer.workers) == len(acts)
    status = read_status(folder / "peer.json")
    assert status is not None and status.state == "ended" and status.reason == f"failed: {peer.error}"


def test_what_was_asked_outlives_a_restart_that_nobody_made_by_hand(folder: Path) -> None:
    with Peer(folder, "obey") as peer:
        peer.wait_for_phase("training")
        peer.ask("pause")
        peer.wait_for_phase("paused")
        (folder / "kept").write_bytes((folder / "peer.json").read_bytes())
    (folder / "kept").rename(folder / "peer.json")  # as if it had been killed
    with Peer(folder, by_hand=False) as peer:
        peer.wait_for_phase("paused")
        assert not peer.workers
    status = read_status(folder / "peer.json")
    assert status is not None
    status.state, status.paused, status.finish = "training", False, True
    status.write(folder / "peer.json")
    with Peer(folder, by_hand=False) as peer:
        peer.join()
        assert not peer.workers
        assert isinstance(peer.events[-1], Finished) and "tt finish" in peer.events[-1].reason
    status.write(folder / "peer.json")
    with Peer(folder, "obey", by_hand=True) as peer:
        peer.wait_for_phase("training")
        assert not peer.control.status.finish


def test_an_auxiliary_peer_ends_but_does_not_pause(folder: Path) -> None:
    with Peer(folder, "wait", kind=AUX) as peer:
        peer.wait_for_phase("training")
        answer = ask(peer.slot.socket, {"command": "pause"})
        assert answer == {"ok": False, "words": "an aux peer cannot be paused: others need it; `tt finish` ends it"}
        assert peer.ask("finish") == "ends now"
        peer.join()
    assert peer.error is None


def test_one_that_hangs_is_ended_a_while_after_it_was_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PAUSE_SECONDS", 0.05)
    with Peer(folder, "stubborn", kind=AUX) as peer:
        peer.wait_for_phase("training")
        peer.ask("finish")
        peer.join()
        assert not peer.status.finish
    assert peer.phases("leaving")[-1].reason == "as asked with `tt finish`"
    assert isinstance(peer.events[-1], Finished) and peer.workers[0].wait(WAIT) == -signal.SIGKILL
    assert peer.error is None


def test_a_wrong_request_is_answered_in_words(folder: Path) -> None:
    with Peer(folder, "obey") as peer:
        peer.wait_for_phase("training")
        for seconds in (0, -1, "2h", [], 1e12):
            assert ask(peer.slot.socket, {"command": "pause", "seconds": seconds})["ok"] is False
        answer = ask(peer.slot.socket, {"command": "dance"})
        assert answer == {"ok": False, "words": "this peer does not know the command 'dance'; it runs another version"}
        assert not peer.control.status.paused


def test_every_peer_of_a_run_has_a_slot_and_an_auxiliary_peer_only_one(folder: Path) -> None:
    first, second = claim_slot(folder, TRAINER), claim_slot(folder, TRAINER)
    assert (first.name, second.name) == ("peer", "peer-2")
    aux = claim_slot(folder, AUX)
    with pytest.raises(TTError, match="an auxiliary peer of this run already works on this machine"):
        claim_slot(folder, AUX)
    for slot in (first, second, aux):
        assert stat.S_IMODE((folder / f"{slot.name}.lock").stat().st_mode) == 0o600
        assert slot.lock is not None
        slot.status.write_text("{}")
        slot.lock.close()
    (folder / "notes.json").write_text("{}")
    assert [slot.name for slot in slots_in(folder.parents[1])] == ["aux-peer", "peer-2", "peer"]
    assert claim_slot(folder, TRAINER).name == "peer"


def test_files_are_readable_by_their_owner_alone(folder: Path) -> None:
    os.umask(0o022)
    with Peer(folder, "obey") as peer:
        peer.wait_for_phase("training")
        for file in (peer.slot.socket, peer.slot.status):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.fixture
def listener(folder: Path) -> Iterator[Path]:
    with answering(folder / "x.sock", lambda request: {"ok": True, "echo": request}):
        yield folder / "x.sock"


def test_the_socket_answers_one_line_with_one_line(listener: Path) -> None:
    assert ask(listener, {"command": "ß"}) == {"ok": True, "echo": {"command": "ß"}}


@pytest.mark.parametrize("sent", [b"", b"{", b"[]\n", b"null\n", b"\xff\xfe\n", b"{}" * 10 + b"\n"])
def test_what_is_no_request_is_hung_up_on_and_the_next_one_answered(sent: bytes, listener: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        descriptor = os.open(listener.parent, os.O_PATH)
        connection.connect(f"/proc/self/fd/{descriptor}/{listener.name}")
        os.close(descriptor)
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert ask(listener, {})["ok"] is True


def test_another_user_gets_no_answer(listener: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one who can reach the socket. The kernel says who asks; here, that is not who answers."""
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(NoAnswer):
        ask(listener, {})


def test_nobody_and_somebody_silent_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "x.sock"
    with pytest.raises(NotRunning):
        ask(path, {})
    with socket.socket(socket.AF_UNIX) as silent:
        descriptor = os.open(folder, os.O_PATH)
        silent.bind(f"/proc/self/fd/{descriptor}/x.sock")
        silent.listen(1)
        for _ in range(4):  # more than may wait
            with pytest.raises(NoAnswer, match="does not answer"):
                ask(path, {}, seconds=0.1)
    with pytest.raises(NotRunning):  # its file is still there, as after a kill
        ask(path, {})
    monkeypatch.setattr("tt_cli.supervisor.control_socket.SECONDS", 0.05)
    with answering(path, lambda request: {"ok": True}), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"/proc/self/fd/{descriptor}/x.sock")  # and says nothing, as one that was stopped
        assert ask(path, {}) == {"ok": True}
    os.close(descriptor)
    assert not path.exists()


def test_the_status_is_written_where_it_matters_and_now_and_then_else(folder: Path) -> None:
    status, slot = PeerState(run="emoji", identity="emoji-1a2b3c4d"), claim_slot(folder, TRAINER)
    with (
        pytest.raises(KeyboardInterrupt),
        Control(slot, status, HouseholdLimits(), by_hand=True) as control,
    ):
        begun = slot.status.stat().st_ino
        control.apply(Log("of which there may be many"))
        assert slot.status.stat().st_ino == begun
        control.apply(Phase("training", "towards step 1"))
        assert slot.status.stat().st_ino != begun
        raise KeyboardInterrupt("SIGTERM")
    known = read_status(slot.status)
    assert known is not None and (known.state, known.reason) == ("ended", "left: SIGTERM")


def test_a_killed_supervisor_leaves_what_was_last_known(folder: Path) -> None:
    boss = start_boss("obey", folder)
    try:
        until(boss, '"training"')
    finally:
        boss.kill()
        boss.communicate()
    seen = look_at(Slot(folder, "peer"))
    assert seen is not None
    assert (seen.running, seen.status.state, seen.status.pid) == (False, "training", boss.pid)
    assert claim_slot(folder, TRAINER).name == "peer"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_machine_that_shuts_down_lets_it_leave(number: signal.Signals, folder: Path) -> None:
    boss = start_boss("obey", folder)
    try:
        until(boss, '"training"')
        boss.send_signal(number)
        output, _ = boss.communicate(timeout=WAIT)
    finally:
        boss.kill()
    told = [json.loads(line) for line in output.splitlines()]
    assert [event["kind"] for event in told] == ["phase", "phase", "saved", "finished"]
    assert told[0]["reason"] == f"{number.name}; once more ends it at once"
    assert boss.returncode == 0
    status = read_status(folder / "peer.json")
    assert status is not None and status.state == "ended"


def test_steps_survive_in_the_status_of_the_next_peer(folder: Path) -> None:
    with Peer(folder, "obey") as peer:
        peer.wait_for_phase("training")
        peer.ask("finish")
        peer.join()
        assert [event.epoch for event in peer.events if isinstance(event, Step)] == [5]
    with Peer(folder, "wait") as peer:
        peer.wait_for_phase("training")
        assert (peer.control.status.step, peer.control.status.saved_step) == (5, 5)


def test_a_terminal_that_is_closed_lets_it_leave(folder: Path) -> None:
    """The supervisor writes to a terminal, and is told of its end by a signal, as shells do."""
    master, slave = pty.openpty()
    boss = start_boss("obey", folder, terminal=slave)
    os.close(slave)
    try:
        said = b""
        while b'"training"' not in said:
            said += os.read(master, 1 << 16)
        os.close(master)
        boss.send_signal(signal.SIGHUP)
        boss.communicate(timeout=WAIT)
    finally:
        boss.kill()
    status = read_status(folder / "peer.json")
    assert status is not None
    assert (status.state, status.reason, status.saved_step) == ("ended", "left", 5)

"""When the assistant starts by itself: where all trainers are in client mode, for a while, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swarm.made import record

from tt_cli.auxiliary import standby as module
from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.standby import AGAIN_SECONDS, LEADER_SECONDS, PATIENCE_SECONDS, Standby, waiting_trainers
from tt_cli.errors import TTError
from tt_cli.memory import DalleAccount
from tt_cli.peer import assistant
from tt_cli.run import folders, load_run
from tt_cli.supervisor.events import Event, Log, Round, Snapshot
from tt_cli.supervisor.host_memory import HostMemory
from tt_cli.swarm.records.consensus import SwarmState

RUN = load_run("emoji")
AUX = {"role": "aux", "client_mode": False}
CLIENT = {"role": "trainer", "client_mode": True}
TRAINER = {"role": "trainer", "client_mode": False}


class Watched:
    """A Standby whose clock is set by hand, and what it did. fails: the assistant does not start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float = 2.0):
        need = DalleAccount(RUN).need("cpu").host
        self.now, self.fails = 100.0, False
        self.shown: list[Event] = []
        self.began = self.ended = 0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.standby = Standby(
            RUN, self.show, self.start, lambda: HostMemory(int(free * need), 4 * need, "this machine")
        )

    def show(self, event: Event) -> None:
        self.shown.append(event)

    @contextmanager
    def start(self) -> Iterator[None]:
        if self.fails:
            raise TTError("no pass")
        self.began += 1
        yield
        self.ended += 1

    def sees(self, *peers: dict[str, Any], after: float = 0.0) -> None:
        self.now += after
        self.standby.show(Snapshot({"peers": [AUX, *peers]}))

    @property
    def told(self) -> list[Log]:
        return [event for event in self.shown if isinstance(event, Log)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TT_HOME", str(tmp_path))
    folders.run_folder(RUN).mkdir(parents=True, exist_ok=True)
    return tmp_path


def test_it_starts_once_after_a_while_says_why_and_ends_with_the_aux_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    with watched.standby:
        watched.sees(CLIENT)
        watched.sees(CLIENT, after=PATIENCE_SECONDS - 1)
        assert not watched.began
        watched.sees(CLIENT, CLIENT, after=1)
        watched.sees(CLIENT, CLIENT, after=AGAIN_SECONDS)
        assert watched.began == 1 and not watched.ended
        (line,) = watched.told
        assert line.message.startswith("all 2 trainers are in client mode, so nobody can make a step: starting the ass")
        assert "of this machine's" in line.message and line.level == "info"
    assert watched.ended == 1
    assert sum(isinstance(event, Snapshot) for event in watched.shown) == 4, "all is passed on"


def test_it_does_not_start_where_somebody_accepts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for peers in ([], [TRAINER], [CLIENT, TRAINER], [CLIENT, {"role": "assistant", "client_mode": False}]):
        watched.sees(*peers)
        watched.sees(*peers, after=2 * PATIENCE_SECONDS)
    watched.sees(CLIENT)
    watched.sees(CLIENT, TRAINER, after=PATIENCE_SECONDS / 2)
    watched.sees(CLIENT, after=PATIENCE_SECONDS / 2)  # the patience begins anew
    assert not watched.began and not watched.told


def test_another_aux_peer_that_leads_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    lease = LeaseFile(folders.run_folder(RUN))
    lease.write("another", False)
    watched.sees(CLIENT)
    watched.sees(CLIENT, after=PATIENCE_SECONDS)
    assert not watched.began
    lease.write("me", True)
    watched.sees(CLIENT, after=1)
    assert watched.began == 1


def test_one_that_leads_and_does_not_start_it_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, lease = Watched(monkeypatch), LeaseFile(folders.run_folder(RUN))
    lease.write("another", False)
    watched.sees(CLIENT)
    watched.sees(CLIENT, after=PATIENCE_SECONDS + LEADER_SECONDS - 1)
    assert not watched.began
    watched.sees(CLIENT, after=1)
    assert watched.began == 1


def test_too_little_memory_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, free=0.9)
    for _ in range(3):
        watched.sees(CLIENT, after=AGAIN_SECONDS)
    assert not watched.began
    (line,) = watched.told
    assert line.level == "error" and "--assist starts it all the same" in line.message


def test_one_that_does_not_start_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.fails = True
    for _ in range(3):
        watched.sees(CLIENT, after=AGAIN_SECONDS)
    (line,) = watched.told
    assert line.level == "error" and "no pass" in line.message and not watched.began
    watched.fails = False
    watched.sees(CLIENT, after=AGAIN_SECONDS)
    assert watched.began == 1


def test_who_waits() -> None:
    assert waiting_trainers([AUX]) == 0
    assert waiting_trainers([AUX, CLIENT, CLIENT]) == 2
    assert waiting_trainers([AUX, {"role": "assistant", "client_mode": True}, CLIENT]) == 1


def test_an_assistant_counts_the_traffic_of_those_who_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, mine = [0.0], list[Event](), torch.tensor([0, 0])
    monkeypatch.setattr(assistant.time, "monotonic", lambda: now[0])
    report, board = assistant.AssistReport(told.append), SimpleNamespace()
    here: Any = SimpleNamespace(board=board, peer_id="me", epoch=9, averager=SimpleNamespace(traffic=mine))
    for hour in range(4):
        mine += 50
        # "anna" moves 300 bytes, begins anew, and moves 100; each of the others is seen once
        there = record("anna", bytes_sent=100, bytes_received=[100, 300, 0, 0][hour]), record(f"guest {hour}")
        board.view = SwarmState.of([*there, record("aux", role="aux", bytes_sent=10**6)])
        report.look(here)
        assert report._traffic.keys() == {"me", "anna", f"guest {hour}"}, "not who has left"
    report(Round(9, "committed", "step 9 made with anna", [], 1.0, 1, {}))
    for _ in range(2):
        report.look(here)
        now[0] += assistant.FIRST_SECONDS
    assert [event.message.rpartition(", ")[2] for event in told if isinstance(event, Log)] == [
        "50% of the swarm's traffic"
    ]

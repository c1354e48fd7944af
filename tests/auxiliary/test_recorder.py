"""The steps of a run as an auxiliary peer records them, whatever happens to its database."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from history.test_store import add_steps
from swarm.made import SteppedClock, record
from told import Told

from tt_cli.auxiliary import recorder as room
from tt_cli.auxiliary.recorder import HISTORY_STEPS, RunRecorder
from tt_cli.errors import TTError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, OtherDatabase, database_url
from tt_cli.run import load_run
from tt_cli.swarm.records.consensus import SwarmState
from tt_cli.swarm.records.peer_record import HistoryRecord

RUN = load_run("emoji")


def view(step: int, **changes: object) -> SwarmState:
    return SwarmState.of([record(epoch=step, **{"loss": 2.5, **changes})])


Open = Callable[..., RunRecorder]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Recorders over the database in this folder; at the end all are closed."""
    monkeypatch.setattr(room, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(room, "CLOSE_SECONDS", 60.0)  # the disk of a busy machine
    made: list[RunRecorder] = []

    def open_one(
        told: Told | None = None, folder: Path = tmp_path, clock: Callable[[], float] = time.time
    ) -> RunRecorder:
        made.append(RunRecorder(RUN, database_url(folder), told or Told(), clock))
        return made[-1]

    yield open_one
    for recorder in made:
        recorder.close()


def test_each_step_is_recorded_once(opened: Open, tmp_path: Path) -> None:
    recorder = opened()
    assert recorder.step == 0 and recorder.history().steps == []
    assert recorder.record(view(1))
    assert not recorder.record(view(1))
    assert not recorder.record(SwarmState.of([]))
    assert recorder.record(view(4, user="anna", round="step 4 made alone"))
    assert not recorder.record(view(3))
    recorder.put("snapshot", {"time": 7.0})
    recorder.close()
    reader = HistoryReader(database_url(tmp_path))
    assert [(step, loss, trainers) for step, _, loss, trainers, _ in reader.steps_after(0)] == [
        (1, 2.5, 1),
        (4, 2.5, 1),
    ]
    assert [(row["user"], row["samples"]) for row in reader.leaderboard()] == [("a", 100), ("anna", 100)]
    assert [row["words"] for row in reader.rounds()] == ["anna: step 4 made alone"]
    assert reader.newest("snapshot") is not None and len(reader.activity()) == 1
    again = opened()
    assert (again.step, again.history()) == (4, recorder.history())
    assert not again.record(view(4)) and again.record(view(5))


def test_a_step_without_a_loss_waits_for_one(opened: Open) -> None:
    recorder = opened()
    assert not recorder.record(view(1, loss=None))
    assert not recorder.record(SwarmState.of([record("x", role="aux", epoch=1, loss=9.0)]))
    assert recorder.record(view(1))


def test_the_loss_is_weighted_by_speed_and_of_those_at_the_step(opened: Open) -> None:
    recorder = opened()
    recorder.record(
        SwarmState.of(
            [
                record("a", epoch=7, loss=1.0, samples_per_second=30.0),
                record("b", epoch=7, loss=5.0, samples_per_second=10.0),
                record("c", epoch=6, loss=100.0, samples_per_second=1000.0),
                record("x", role="aux", epoch=7, loss=100.0),
            ]
        )
    )
    assert recorder.history().steps[-1][:2] == (7, pytest.approx(2.0))


def test_peers_that_have_no_speed_yet_count_alike(opened: Open) -> None:
    recorder = opened()
    recorder.record(
        SwarmState.of([record(peer, loss=loss, samples_per_second=0.0) for peer, loss in (("a", 1.0), ("b", 3.0))])
    )
    assert recorder.history().steps[-1][1] == pytest.approx(2.0)


def test_the_wildest_records_that_may_be_published_leave_it_finite(opened: Open) -> None:
    recorder = opened()
    text = "\x00\x1b" * 40
    wild = [
        record(peer, loss=1e39, samples_per_second=1e12, total_samples=10**12, user=text, device=text, round=text)
        for peer in ("a", "b", text)
    ]
    assert recorder.record(SwarmState.of(wild))
    assert math.isfinite(recorder.history().steps[-1][1])
    recorder.close()
    assert opened().step == 5


@pytest.mark.parametrize("steps", [255, 256, 257, 1000, 5111])
def test_a_long_history_is_thinned_evenly_and_the_last_step_stays(steps: int, opened: Open, tmp_path: Path) -> None:
    HistoryWriter(database_url(tmp_path), RUN.identity).close()
    add_steps(database_url(tmp_path), steps)
    history = opened().history()
    kept = [step for step, _, _ in history.steps]
    assert len(kept) == min(steps, HISTORY_STEPS)
    assert (kept[0], kept[-1]) == (1, steps)
    gaps = {later - earlier for earlier, later in zip(kept, kept[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1
    assert HistoryRecord.model_validate(history.model_dump()) == history


def test_a_database_of_another_run_is_refused(opened: Open, tmp_path: Path) -> None:
    HistoryWriter(database_url(tmp_path), "other-00000000").close()
    with pytest.raises(OtherDatabase):
        opened()


def test_a_database_that_is_away_stops_nothing(opened: Open, tmp_path: Path) -> None:
    """It is told once; what was seen meanwhile is written when it is back, and what it held is known then."""
    told, folder = Told(), tmp_path / "away"
    folder.mkdir()
    for step in (1, 2):
        before = opened(folder=folder)
        before.record(view(step, total_samples=50 + 50 * step))
        before.close()  # it is written then
    folder.rename(tmp_path / "there")
    recorder = opened(told, folder)
    for step in range(3, 6):
        assert recorder.record(view(step, total_samples=100 + 100 * step))
    told.wait("does not answer")
    with pytest.raises(TTError, match="cannot record an order: "):
        recorder.go_back(1, 3)
    assert recorder.step == 5
    (tmp_path / "there").rename(folder)
    told.wait("the history is written again")
    assert told.found("does not answer") == told.lines[:1]
    recorder.go_back(1, 3)
    assert [step for step, _, _ in recorder.history().steps] == [1]
    recorder.record(view(2, loss=9.0, era=3, total_samples=700))
    recorder.close()
    reader = HistoryReader(database_url(folder))
    assert [step[:1] + step[2:3] for step in reader.steps_after(0)] == [(1, 2.5), (2, 9.0)]
    assert reader.leaderboard()[0]["samples"] == 700


def test_a_database_that_others_hold_is_waited_for(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = opened()
    other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
    other.execute("begin immediate")
    assert all(recorder.record(view(step)) for step in range(1, 50))
    assert other.execute("select count(*) from steps").fetchone() == (0,), "and nobody waits for it"
    other.execute("commit")
    other.close()
    recorder.close()
    assert opened().step == 49


def test_what_waits_is_bounded(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_DUE", 10)
    told, folder = Told(), tmp_path / "away"
    recorder = opened(told, folder)
    for step in range(1, 31):
        recorder.record(view(step))
    folder.mkdir()
    told.wait("the history is written again; 22 steps and counts had to be dropped")
    recorder.close()
    assert [step for step, _, _ in opened(folder=folder).history().steps] == list(range(21, 31))


def test_a_database_that_is_damaged_at_work_is_set_aside(opened: Open, tmp_path: Path) -> None:
    told = Told()
    recorder = opened(told)
    recorder.record(view(1))
    recorder.close()
    recorder = opened(told)
    (tmp_path / "history.db").write_bytes(b"no database at all" * 1000)
    recorder.record(view(2))
    told.wait("history.db was damaged: it is history.db.damaged-")
    told.wait("the history is written again")
    recorder.close()
    assert HistoryReader(database_url(tmp_path)).steps_after(0)[-1][0] == 2


def test_steps_that_the_organiser_took_back_are_no_part_of_the_history(opened: Open) -> None:
    recorder = opened()
    for step in (1, 2, 3, 4):
        recorder.record(view(step))
    recorder.go_back(2, 1)
    assert recorder.step == 2 and [step for step, _, _ in recorder.history().steps] == [1, 2]
    assert not recorder.record(view(4)), "a look at the swarm of before the order, which is the newest for a moment"
    assert recorder.record(view(3, loss=9.0, era=1))
    recorder.close()
    again = opened()
    assert [(step, loss) for step, loss, _ in again.history().steps] == [(1, 2.5), (2, 2.5), (3, 9.0)]
    assert again.history() == recorder.history()


def looks(recorder: RunRecorder, clock: SteppedClock, step: int, seconds: int, **changes: object) -> None:
    """One look a second at a voter who is at this step."""
    for _ in range(seconds):
        clock.now += 1.0
        recorder.record(view(step, **{"vote": True, **changes}))


@pytest.mark.parametrize("vote", [False, True])
def test_a_lie_while_nobody_else_was_there_does_not_end_the_history(vote: bool, opened: Open, tmp_path: Path) -> None:
    clock, told = SteppedClock(), Told()
    recorder = opened(clock=clock)
    for step in range(1, 4):
        looks(recorder, clock, step, 60)
    looks(recorder, clock, RUN.schedule.total_steps, 30, peer_id="liar", vote=vote)
    assert recorder.step == RUN.schedule.total_steps
    recorder.close()
    recorder = opened(told, clock=clock)
    for step in range(4, 12):
        looks(recorder, clock, step, 60)
    told.wait("voters are at step 9: later steps that were recorded do not count")
    recorder.close()
    assert [row[0] for row in HistoryReader(database_url(tmp_path)).steps_after(0)] == [1, 2, 3, 9, 10, 11]
    assert opened().history() == recorder.history()


def test_steps_of_which_the_voters_are_only_not_seen_stay_or_come_back(opened: Open, tmp_path: Path) -> None:
    """Looks that are late, a swarm in two halves, one that votes alone at night, for less long than they took."""
    clock = SteppedClock()
    recorder = opened(clock=clock)
    for step in range(1, 12):
        looks(recorder, clock, step, 60)
    seconds = 7 * 60  # from step 4 to step 11
    looks(recorder, clock, 3, seconds - 1)
    looks(recorder, clock, 11, 1)
    looks(recorder, clock, 3, seconds - 10)
    looks(recorder, clock, 9, 3600)  # they may just be making the others' steps
    looks(recorder, clock, 3, 3600, vote=False)
    clock.now += 3600.0  # without a look
    looks(recorder, clock, 3, 1)
    assert recorder.step == 11
    looks(recorder, clock, 3, 10)
    assert recorder.step == 3
    looks(recorder, clock, 4, 1, loss=9.0)
    looks(recorder, clock, 13, 1)
    recorder.close()
    told = [(row[0], row[2]) for row in HistoryReader(database_url(tmp_path)).steps_after(0)]
    assert told == [(step, 9.0 if step == 4 else 2.5) for step in (*range(1, 12), 13)]
    assert opened().history() == recorder.history()


def test_who_trains_is_recorded_after_the_clock_was_set_back(opened: Open, tmp_path: Path) -> None:
    clock = SteppedClock(1e9)
    recorder = opened(clock=clock)
    looks(recorder, clock, 1, 60)
    began = clock.now = clock.now - 3600.0
    looks(recorder, clock, 1, 60)
    recorder.close()
    seen = [at for at, *_ in HistoryReader(database_url(tmp_path)).activity() if began <= at <= began + 60.0]
    assert len(seen) == 2


KILLED = """
import itertools, sys, threading
from pathlib import Path
from auxiliary.test_recorder import RUN, view
from tt_cli.auxiliary.recorder import RunRecorder
from tt_cli.history.writer import HistoryWriter, database_url
folder = Path(sys.argv[1])
committed, record_step = threading.Semaphore(2), HistoryWriter.record_step
def told(store, made, seen, target):
    record_step(store, made, seen, target)
    print("step", made.step, flush=True)
    committed.release()
HistoryWriter.record_step = told
recorder = RunRecorder(RUN, database_url(folder), print)
for step in itertools.count(recorder.step + 1):
    committed.acquire()
    recorder.record(view(step, total_samples=10 * step))
"""


def test_killed_while_it_writes_it_loses_no_step_that_it_had_told(opened: Open, tmp_path: Path) -> None:
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for _ in range(3):
                last = int(process.stdout.readline().removeprefix("step "))
        finally:
            process.kill()
        whole = process.stdout.read().rpartition("\n")[0].splitlines()
        process.wait()
        last = int(whole[-1].removeprefix("step ")) if whole else last
    steps = [step for step, _, _ in opened().history().steps]
    assert steps[-1] >= last
    with sqlite3.connect(tmp_path / "history.db") as plain:
        assert plain.execute("pragma integrity_check").fetchone() == ("ok",)
        count, newest = plain.execute("select count(*), max(step) from steps").fetchone()
        assert count == newest, "a step is missing"
    plain.close()

"""The peer's own backups."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer.states import small_run, trained
from swarm.made import SteppedClock

from tt_cli.checkpoint.checkpoint_files import load, save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.identity.passes import RollBack
from tt_cli.peer import backup as room
from tt_cli.peer.backup import BACKUP_SECONDS, Backups
from tt_cli.run import folders
from tt_cli.supervisor.events import Choice, Event, Log, Saved


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    clock = SteppedClock(100.0)
    monkeypatch.setattr(room, "time", clock)
    return clock


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def backups(clock: SteppedClock, told: list[Event]) -> Backups:
    return Backups(small_run(), told.append)


def state(steps: int) -> TrainingState:
    found = trained().snapshot()
    found.step = steps
    return found


def test_what_is_written_is_read_again(backups: Backups, told: list[Event]) -> None:
    assert backups.newest() is None
    backups.write(state(3), wait=True)
    (saved,) = told
    assert isinstance(saved, Saved) and saved.epoch == 3
    assert load(Path(saved.path)).digest() == state(3).digest()
    again = Backups(small_run(), told.append).newest()
    assert again is not None and again.digest() == state(3).digest()


def test_it_is_due_once_a_minute_when_there_is_something_new(backups: Backups, clock: SteppedClock) -> None:
    assert not backups.due(1)
    clock.now += BACKUP_SECONDS + 1
    assert backups.due(1) and backups.due(0)
    backups.write(state(1), wait=True)
    assert not backups.due(2)
    clock.now += BACKUP_SECONDS + 1
    assert not backups.due(1)
    assert backups.due(2)


def test_it_is_not_due_while_one_is_being_written(
    backups: Backups, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def is_alive(self) -> bool:
            return True

    clock.now += BACKUP_SECONDS + 1
    monkeypatch.setattr(backups, "_writer", Busy())
    assert not backups.due(1)


def test_a_peer_that_starts_from_its_backup_does_not_write_it_again(
    backups: Backups, clock: SteppedClock, told: list[Event]
) -> None:
    backups.write(state(3), wait=True)
    again = Backups(small_run(), told.append)
    again.newest()
    clock.now += BACKUP_SECONDS + 1
    assert not again.due(3) and again.due(4)
    again.write(state(3), wait=True)
    assert len(told) == 1


def test_a_full_disk_is_told_and_the_next_try_may_succeed(
    backups: Backups, clock: SteppedClock, told: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.checkpoints(small_run())
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    backups.write(state(3), wait=True)
    (log,) = told
    assert isinstance(log, Log) and log.level == "error"
    assert log.message.startswith("no backup was written: cannot save") and "\n" not in log.message
    clock.now += BACKUP_SECONDS + 1
    assert backups.due(3)
    folder.unlink()
    backups.write(state(3), wait=True)
    assert isinstance(told[-1], Saved) and told[-1].epoch == 3


def test_a_damaged_backup_is_set_aside_and_the_one_before_is_used(backups: Backups, told: list[Event]) -> None:
    for step in (3, 4):
        backups.write(state(step), wait=True)
    newest = Path(told[-1].path) if isinstance(told[-1], Saved) else Path()
    newest.write_bytes(newest.read_bytes()[:-7])
    told.clear()
    found = Backups(small_run(), told.append).newest()
    assert found is not None and found.step == 3
    assert [(type(event), getattr(event, "level", "")) for event in told] == [(Log, "warning")]


def test_weights_without_an_optimizer_are_told_and_passed_over(backups: Backups, told: list[Event]) -> None:
    """What `tt convert` writes can be drawn with, not trained on."""
    backups.write(state(3), wait=True)
    alone = state(9)
    alone.optimizer = {}
    path = save(folders.checkpoints(small_run()), alone)
    told.clear()
    found = Backups(small_run(), told.append).newest()
    assert found is not None and found.step == 3
    (log,) = told
    assert isinstance(log, Log) and log.message.startswith(f"{path} holds weights to draw with, not the optimizer's")


def test_the_order_of_examples_is_new_at_each_start_also_with_a_seed(told: list[Event]) -> None:
    def start(wanted: int | None) -> int:
        backups = Backups(small_run(), told.append)
        seed = backups.choose_seed(wanted)
        backups.write(trained(steps=1).snapshot(), wait=True)
        return seed

    first, *returns = [start(7) for _ in range(4)]
    assert first == 7 and len({first, *returns}) == 4
    assert start(8) == 8
    for file in folders.checkpoints(small_run()).glob("*.safetensors"):
        file.unlink()
    assert [start(7) for _ in range(4)] == [first, *returns], "the same row again, for who wants to repeat it"
    assert start(None) != start(None)
    reasons = [event.reason for event in told if isinstance(event, Choice)]
    assert reasons[0] == "--seed 7" and "return 1" in reasons[1] and reasons[-1] == "new at each start"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"wanted": 7}', b'{"wanted": 7, "returns": "many"}'])
def test_a_damaged_note_of_the_seed_is_no_great_loss(backups: Backups, damage: bytes) -> None:
    backups.write(trained(steps=1).snapshot(), wait=True)
    (folders.checkpoints(small_run()) / "own.json").write_bytes(damage)
    assert backups.choose_seed(7) == 7


def test_going_back_sets_later_backups_aside_and_writes_new_ones(backups: Backups, told: list[Event]) -> None:
    for snapshot in [state(step) for step in (3, 5, 4, 6)]:
        backups.write(snapshot)  # waits for the one before, after which 4 is old; the last one is being written
    backups.go_back(RollBack(3, "aa", "", order=1))
    assert [event.message for event in told if isinstance(event, Log)] == [
        f"set aside as step-0000000{step}.safetensors.before-order-1: the organiser took the run back to step 3"
        for step in (6, 5)
    ]
    again = Backups(small_run(), told.append).newest()
    assert again is not None and again.step == 3
    backups.write(state(4), wait=True)
    assert [event.epoch for event in told if isinstance(event, Saved)] == [3, 5, 6, 4]

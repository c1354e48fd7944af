"""The state that an auxiliary peer keeps: from the disk, from trainers, for those who ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer.states import small_run, trained
from swarm_units.made import record

from tt_cli.auxiliary import keeper as room
from tt_cli.auxiliary.coordinator import run_state_limit
from tt_cli.auxiliary.keeper import Keeper
from tt_cli.checkpoint import TrainingState, load, pack, save, unpack
from tt_cli.model import Dalle, DalleConfig
from tt_cli.peer.shared import TrainedState
from tt_cli.run import folders, load_run
from tt_cli.supervisor.events import Event, Log, Saved, Synchronised
from tt_cli.swarm.board import View

RUN = small_run()


def state(step: int) -> TrainingState:
    """A state as a trainer would pack it."""
    found = trained().snapshot()
    found.step = step
    return found


class Swarm:
    """What the keeper sees of the others: their records, and one donor's answer."""

    def __init__(self, *records: Any, answer: bytes | None = None) -> None:
        self.view = View.of(records)
        self.answer = answer
        self.asked: list[list[str]] = []

    def fresh_view(self) -> View:
        return self.view

    def download(self, donors: list[str], timeout: float) -> tuple[str, dict[str, Any], torch.Tensor] | None:
        self.asked.append(donors)
        if self.answer is None:
            return None
        return donors[0], {}, torch.frombuffer(bytearray(self.answer), dtype=torch.uint8)


def signed(sent: TrainingState, **changes: object) -> Any:
    return record("anna", **{"epoch": sent.step, "digest": sent.digest(), **changes})


def fetch(keeper: Keeper, swarm: Swarm) -> None:
    keeper.fetch(swarm, swarm)  # type: ignore[arg-type]


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def keeper(told: list[Event]) -> Keeper:
    return Keeper(RUN, told.append)


def test_without_a_state_it_hands_nothing_over(keeper: Keeper, told: list[Event]) -> None:
    assert (keeper.epoch, keeper.digest, told) == (0, "", [])
    with pytest.raises(LookupError, match="no state yet"):
        keeper.hand_over()


def test_it_holds_the_newest_state_of_the_disk_again(told: list[Event]) -> None:
    for step in (3, 4):
        save(folders.checkpoints(RUN), state(step))
    keeper = Keeper(RUN, told.append)
    assert (keeper.epoch, keeper.digest) == (4, state(4).digest())
    about, blob = keeper.hand_over()
    assert about == {"epoch": 4, "digest": keeper.digest}
    assert unpack(blob.numpy().tobytes()).digest() == keeper.digest
    assert [type(event) for event in told] == [Log]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_held(told: list[Event]) -> None:
    save(folders.checkpoints(RUN), state(3))
    newest = save(folders.checkpoints(RUN), state(4))
    newest.write_bytes(newest.read_bytes()[:-9])
    assert Keeper(RUN, told.append).epoch == 3
    assert isinstance(told[0], Log) and told[0].level == "warning" and "damaged" in told[0].message
    assert not newest.exists() and newest.with_name(newest.name + ".corrupt").exists()


def test_damaged_checkpoints_alone_are_no_state(told: list[Event]) -> None:
    newest = save(folders.checkpoints(RUN), state(4))
    newest.write_bytes(b"")
    keeper = Keeper(RUN, told.append)
    assert keeper.epoch == 0
    with pytest.raises(LookupError):
        keeper.hand_over()


def test_it_wants_what_is_new_and_not_what_is_older(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keeper.wants(View.of([]))
    assert keeper.wants(View.of([record(epoch=0, digest="aa")]))
    keeper._hold(state(5), pack(state(5)))
    assert not keeper.wants(View.of([record(epoch=5, digest=state(5).digest())]))
    assert not keeper.wants(View.of([record(epoch=4, digest="aa")]))
    assert keeper.wants(View.of([record(epoch=5, digest="aa")]))
    assert keeper.wants(View.of([record(epoch=6, digest="aa")]))


def test_it_fetches_now_and_then_but_the_last_state_at_once(keeper: Keeper) -> None:
    fetch(keeper, Swarm())
    assert not keeper.wants(View.of([record(epoch=6)]))
    assert keeper.wants(View.of([record(epoch=RUN.schedule.total_steps)]))


def test_a_signed_state_is_kept_in_memory_and_on_the_disk(keeper: Keeper, told: list[Event]) -> None:
    swarm = Swarm(signed(state(7)), answer=pack(state(7)))
    fetch(keeper, swarm)
    assert swarm.asked == [["anna"]]
    assert (keeper.epoch, keeper.digest) == (7, state(7).digest())
    synchronised, saved = told
    assert isinstance(synchronised, Synchronised) and synchronised.source == "anna"
    assert isinstance(saved, Saved) and load(Path(saved.path)).digest() == state(7).digest()
    assert unpack(keeper.hand_over()[1].numpy().tobytes()).digest() == state(7).digest()


def test_nobodys_answer_changes_nothing(keeper: Keeper, told: list[Event]) -> None:
    fetch(keeper, Swarm(signed(state(7))))
    assert (keeper.epoch, told) == (0, [])


def forged_run_file(sent: TrainingState) -> TrainingState:
    return replace(sent, run_toml=small_run(**{"model.depth": 4}).to_toml())


def unreadable_run_file(sent: TrainingState) -> TrainingState:
    return replace(sent, run_toml="[run]\nname = 5\n")


def other_run(sent: TrainingState) -> TrainingState:
    run = small_run(**{"run.seed": 9})
    return replace(sent, run_toml=run.to_toml(), identity=run.identity)


def nan(sent: TrainingState) -> TrainingState:
    next(iter(sent.parameters.values()))[0] = float("nan")
    return sent


@pytest.mark.parametrize("change", [forged_run_file, unreadable_run_file, other_run, nan])
def test_a_signed_state_that_is_not_of_this_run_is_not_kept(change: Any, keeper: Keeper, told: list[Event]) -> None:
    sent = change(state(7))
    fetch(keeper, Swarm(signed(sent), answer=pack(sent)))
    assert_nothing_kept(keeper, told)


@pytest.mark.parametrize("records", [{"digest": "aa"}, {"epoch": 8}, {"role": "aux"}], ids=str)
def test_a_state_that_no_trainer_signed_is_not_kept(
    records: dict[str, object], keeper: Keeper, told: list[Event]
) -> None:
    fetch(keeper, Swarm(signed(state(7), **records), answer=pack(state(7))))
    assert_nothing_kept(keeper, told)


@pytest.mark.parametrize("answer", [b"", b"x" * 5000, pack(state(7))[:-1]], ids=["empty", "text", "torn"])
def test_bytes_that_are_no_state_are_not_kept(answer: bytes, keeper: Keeper, told: list[Event]) -> None:
    fetch(keeper, Swarm(signed(state(7)), answer=answer or b" "))
    assert_nothing_kept(keeper, told)


def assert_nothing_kept(keeper: Keeper, told: list[Event]) -> None:
    assert (keeper.epoch, keeper.digest) == (0, "")
    assert list(folders.checkpoints(RUN).iterdir()) == []
    (log,) = told
    assert isinstance(log, Log) and log.level == "warning" and "\n" not in log.message
    assert log.message.startswith("anna sent a state that is not kept: ")


def test_a_full_disk_leaves_the_state_in_memory(
    keeper: Keeper, told: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.checkpoints(RUN)
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    fetch(keeper, Swarm(signed(state(7)), answer=pack(state(7))))
    assert keeper.epoch == 7
    assert isinstance(told[-1], Log) and told[-1].message.startswith("the state is kept in memory only: cannot save")


def test_only_the_newest_are_kept_on_the_disk(keeper: Keeper) -> None:
    for step in range(1, room.KEPT + 3):
        fetch(keeper, Swarm(signed(state(step)), answer=pack(state(step))))
    assert len(list(folders.checkpoints(RUN).iterdir())) == room.KEPT


def test_a_state_of_the_run_is_within_the_limit_and_the_limit_is_not_far_off() -> None:
    run = load_run("emoji")
    packed = TrainedState(run, Dalle(DalleConfig.from_run(run)), None).pack()
    assert len(packed) <= run_state_limit(run) <= 20 * len(packed)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 4, 100])
def test_the_limit_follows_the_model(groups: int, tied: bool) -> None:
    run = load_run("emoji").replaced(
        {
            "model.dim": 64,
            "model.depth": 5,
            "model.shared_layer_groups": groups,
            "model.attention_types": ["axial_row"],
            "model.tied_embeddings": tied,
        }
    )
    parameters = sum(p.numel() for p in Dalle(DalleConfig.from_run(run)).parameters())
    assert 12 * parameters < run_state_limit(run)  # fp32, and two fp32 moments


def test_the_papers_model_has_a_limit_that_memory_can_hold() -> None:
    limit = run_state_limit(load_run("dalle"))
    assert 126_000_000 * 6 < limit < 4e9

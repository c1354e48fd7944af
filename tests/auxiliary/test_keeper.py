"""The state that an auxiliary peer keeps: from the disk, from trainers, for those who ask."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peer.states import small_run, trained

from tt_cli.auxiliary.state_keeper import KEPT, StateKeeper
from tt_cli.checkpoint.checkpoint_files import load, save
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.identity.passes import RollBack
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import folders
from tt_cli.supervisor.events import Event, Log, Saved
from tt_cli.swarm.state.bridge import Chunks, StateBuffer
from tt_cli.task import task_of

RUN = small_run(**{"model.dim": 32, "model.depth": 2, "model.heads": 2, "model.dim_head": 16})


@functools.cache
def fresh() -> TrainedState:
    return TrainedState(RUN, Dalle(DalleConfig.from_run(RUN)), None)


def state(step: int) -> TrainingState:
    """A state as a trainer would hold it."""
    found = fresh().snapshot()
    found.step = step
    return found


def handed_over(keeper: StateKeeper) -> TrainingState:
    """What a taker would make of it."""
    offered = keeper.hand_over()
    assert offered is not None
    tree = keeper.trained.read_tree(offered[0])
    return received_state(tree, offered[1].view(tree.nbytes), RUN.to_toml())


def hold(keeper: StateKeeper, one: TrainingState, sure: bool = False) -> None:
    """As when it was taken from members who signed it."""
    tree, buffer = one.tree(), StateBuffer.new()
    one.write_into(tree, buffer.write)
    with Chunks(tree, range(len(tree)), buffer) as chunks:
        keeper.state.patch(tree, chunks)
    keeper.accept()
    keeper.save(sure)


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def keeper(told: list[Event]) -> StateKeeper:
    return StateKeeper(RUN, told.append)


def test_without_a_state_it_hands_nothing_over(keeper: StateKeeper, told: list[Event]) -> None:
    assert (keeper.position, keeper.hand_over(), told) == ((0, ""), None, [])


def test_a_models_size_counts_shared_weights_once_or_in_every_layer() -> None:
    """Layers that share weights are as many as layers that do not; all that is shared is there once."""
    shared, deep = small_run(**{"model.depth": 6}), small_run(**{"model.depth": 6, "model.shared_layer_groups": 8})
    found, all_distinct = task_of(shared).sizes(), task_of(deep).sizes()
    assert all_distinct["effective"] == all_distinct["parameters"] == found["effective"]
    assert found["parameters"] == sum(one.numel() for one in Dalle(DalleConfig.from_run(shared)).parameters())


def test_it_holds_the_newest_state_of_the_disk_again(told: list[Event]) -> None:
    for step in (3, 4):
        save(folders.checkpoints(RUN), state(step))
    keeper = StateKeeper(RUN, told.append)
    assert keeper.position == (4, state(4).digest()) == (4, handed_over(keeper).digest())
    assert [type(event) for event in told] == [Log]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_held(told: list[Event]) -> None:
    save(folders.checkpoints(RUN), state(3))
    newest = save(folders.checkpoints(RUN), state(4))
    newest.write_bytes(newest.read_bytes()[:-9])
    assert StateKeeper(RUN, told.append).epoch == 3
    assert isinstance(told[0], Log) and told[0].level == "warning" and "damaged" in told[0].message
    assert not newest.exists() and newest.with_name(newest.name + ".corrupt").exists()


def test_damaged_checkpoints_alone_are_no_state(told: list[Event]) -> None:
    newest = save(folders.checkpoints(RUN), state(4))
    newest.write_bytes(b"")
    keeper = StateKeeper(RUN, told.append)
    assert keeper.epoch == 0 and keeper.hand_over() is None


def test_what_members_signed_is_kept_in_memory_and_on_the_disk(keeper: StateKeeper, told: list[Event]) -> None:
    hold(keeper, state(7))
    assert keeper.position == (7, state(7).digest())
    (saved,) = told
    assert isinstance(saved, Saved)
    found = load(Path(saved.path))
    assert found.digest() == state(7).digest() == handed_over(keeper).digest()
    assert found.run_toml == RUN.to_toml()


def test_what_nobody_signed_is_not_handed_over(keeper: StateKeeper) -> None:
    hold(keeper, state(7))
    zeros = {name: torch.zeros(shape) for name, shape in keeper.trained.shapes().items()}
    keeper.state.step(zeros)
    assert (keeper.position, keeper.hand_over()) == ((0, ""), None)
    keeper.accept()
    assert keeper.epoch == 8 == handed_over(keeper).step


def test_only_trees_of_the_run_are_read(keeper: StateKeeper) -> None:
    assert keeper.trained.read_tree(state(7).tree().manifest()).step == 7
    other = replace(state(7), identity=small_run(**{"run.seed": 9}).identity)
    for sent in (other, trained().state()):
        with pytest.raises(ValueError, match="a state of run"):
            keeper.trained.read_tree(sent.tree().manifest())


def test_a_full_disk_leaves_the_state_in_memory(keeper: StateKeeper, told: list[Event]) -> None:
    folder = folders.checkpoints(RUN)
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    hold(keeper, state(7))
    assert keeper.epoch == 7
    assert isinstance(told[-1], Log) and told[-1].message.startswith("the state is kept in memory only: cannot save")
    hold(keeper, state(8))
    assert sum(isinstance(event, Log) for event in told) == 1, "at every step it would be all that is told"
    folder.unlink()
    hold(keeper, state(9))
    shutil.rmtree(folder)
    folder.write_text("a file in the folder's place")
    hold(keeper, state(10))
    assert [type(event) for event in told] == [Log, Saved, Log], "when it has worked meanwhile it is new"


def test_the_newest_are_kept_on_the_disk_and_a_few_older_ones(keeper: StateKeeper) -> None:
    for step in range(1, KEPT + 13):
        hold(keeper, state(step))
    kept = sorted(int(path.name[5:13]) for path in folders.checkpoints(RUN).iterdir())
    assert kept[-KEPT:] == list(range(13, KEPT + 13))
    assert 2 <= len(kept) - KEPT <= 4, "older ones, to which the organiser may take the run back"


def test_the_last_that_two_voters_held_stays_however_many_steps_one_claims(keeper: StateKeeper) -> None:
    hold(keeper, state(89))
    hold(keeper, state(90), sure=True)
    for step in range(1000, 1000 + 2 * KEPT):
        hold(keeper, state(step))
    assert load(folders.checkpoints(RUN) / "step-00000090.safetensors").digest() == state(90).digest()
    hold(keeper, state(1020), sure=True)
    assert StateKeeper(RUN, lambda event: None).epoch == 1020


def test_another_state_of_the_same_step_overwrites_no_checkpoint(keeper: StateKeeper, told: list[Event]) -> None:
    hold(keeper, state(7))
    other = state(7)
    next(iter(other.parameters.values())).add_(1.0)
    hold(keeper, other)
    (aside,) = folders.checkpoints(RUN).glob("*.of-*")
    assert load(aside).digest() == state(7).digest() and keeper.position == (7, other.digest())
    (line,) = [event for event in told if isinstance(event, Log)]
    assert line.level == "warning" and aside.name in line.message
    assert StateKeeper(RUN, told.append).position == (7, other.digest())


def test_it_goes_back_to_the_checkpoint_of_an_order(keeper: StateKeeper, told: list[Event]) -> None:
    for step in (3, 4):
        save(folders.checkpoints(RUN), state(step))
    hold(keeper, state(5))
    keeper.go_back(RollBack(3, state(3).digest(), "", order=1))
    assert keeper.position == (3, state(3).digest()) == (3, handed_over(keeper).digest())
    before = len(told)
    keeper.go_back(RollBack(3, state(3).digest(), "", order=1))  # at every look, while it cannot be written down
    assert keeper.position == (3, state(3).digest()) and len(told) == before, "it is read and told once"
    assert StateKeeper(RUN, told.append).epoch == 3


def test_without_the_checkpoint_of_an_order_it_holds_nothing_until_somebody_has_it(keeper: StateKeeper) -> None:
    hold(keeper, state(5))
    keeper.go_back(RollBack(3, state(3).digest(), "", order=1))
    assert keeper.hand_over() is None and keeper.epoch == 0
    hold(keeper, state(3))
    assert keeper.epoch == 3

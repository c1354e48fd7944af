"""The state that an auxiliary peer keeps: from the disk, from trainers, for those who ask."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest
from peer.states import small_run, trained
from swarm.made import record

from tt_cli.auxiliary import state_keeper as room
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.checkpoint.checkpoint_files import load, save
from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.identity.passes import RollBack
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import folders
from tt_cli.supervisor.events import Event, Log, Saved, Synchronised
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.state.bridge import Chunks, NoState, ReceivedState, StateBuffer
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
    tree = keeper.read_tree(offered[0])
    return received_state(tree, offered[1].view(tree.nbytes), RUN.to_toml())


class Swarm:
    """What the keeper sees of the others: a state that its members signed, or nobody's."""

    def __init__(self, answer: TrainingState | None = None, received: int = 7) -> None:
        self.answer, self.received = answer, received
        self.asked: list[StateTree | None] = []

    def take_state(self, own: StateTree | None, timeout: float, *, at_once: int) -> ReceivedState:
        self.asked.append(own)
        if self.answer is None:
            raise NoState("none of 0 peers can hand over a state", asked=False)
        tree, buffer = self.answer.tree(), StateBuffer.new()
        indexes = list(range(len(tree))) if own is None else tree.differing(own)
        write_chunks(self.answer, indexes, buffer)
        return ReceivedState(tree, Chunks(tree, indexes, buffer), ("anna",), received=self.received)


def write_chunks(one: TrainingState, indexes: list[int], buffer: StateBuffer) -> None:
    """As the averager's process leaves them: what was not sent is zeros."""
    tree, whole = one.tree(), bytearray(one.tree().nbytes)

    def write(offset: int, data: memoryview) -> None:
        whole[offset : offset + len(data)] = data

    one.write_into(tree, write)
    for offset, size in map(tree.place, indexes):
        buffer.write(offset, memoryview(whole)[offset : offset + size])


def fetch(keeper: StateKeeper, answer: TrainingState | None = None) -> Swarm:
    swarm = Swarm(answer)
    keeper.fetch(swarm)  # type: ignore[arg-type]
    return swarm


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def keeper(told: list[Event]) -> StateKeeper:
    return StateKeeper(RUN, told.append)


def test_without_a_state_it_hands_nothing_over(keeper: StateKeeper, told: list[Event]) -> None:
    assert (keeper.epoch, keeper.digest, keeper.hand_over(), told) == (0, "", None, [])


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
    assert (keeper.epoch, keeper.digest) == (4, state(4).digest()) == (4, handed_over(keeper).digest())
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


def test_it_wants_what_is_new_and_not_what_is_older(keeper: StateKeeper) -> None:
    assert not keeper.wants(SwarmState.of([]))
    assert keeper.wants(SwarmState.of([record(epoch=0, digest="aa")]))
    fetch(keeper, state(5))
    keeper._fetch_again_at = 0.0
    assert not keeper.wants(SwarmState.of([record(epoch=5, digest=state(5).digest())]))
    assert not keeper.wants(SwarmState.of([record(epoch=4, digest="aa")]))
    assert keeper.wants(SwarmState.of([record(epoch=5, digest="aa")]))
    assert keeper.wants(SwarmState.of([record(epoch=6, digest="aa")]))


def test_it_fetches_now_and_then_but_the_last_state_at_once(keeper: StateKeeper) -> None:
    fetch(keeper)
    assert not keeper.wants(SwarmState.of([record(epoch=6)]))
    assert keeper.wants(SwarmState.of([record(epoch=RUN.schedule.total_steps)]))


def test_it_takes_eight_megabits_a_second_of_others_in_the_mean(keeper: StateKeeper) -> None:
    before = time.monotonic()
    keeper.fetch(Swarm(state(5), received=50 * 10**6))  # type: ignore[arg-type]
    assert keeper._fetch_again_at >= before + 50


def test_a_signed_state_is_kept_in_memory_and_on_the_disk(keeper: StateKeeper, told: list[Event]) -> None:
    assert fetch(keeper, state(7)).asked == [None]
    assert (keeper.epoch, keeper.digest) == (7, state(7).digest())
    synchronised, saved = told
    assert isinstance(synchronised, Synchronised) and isinstance(saved, Saved)
    assert (synchronised.source, synchronised.bytes, synchronised.names) == ("anna", 7, [])
    assert synchronised.chunks == len(state(7).tree())
    found = load(Path(saved.path))
    assert found.digest() == state(7).digest() == handed_over(keeper).digest()
    assert found.run_toml == RUN.to_toml()


def test_what_it_holds_already_is_not_sent_again(keeper: StateKeeper, told: list[Event]) -> None:
    fetch(keeper, state(7))
    later = state(8)
    name = next(iter(later.parameters))
    later.parameters[name] += 1
    assert [tree.step for tree in fetch(keeper, later).asked if tree] == [7]
    assert handed_over(keeper).digest() == later.digest() == keeper.digest
    assert told[-2].names == [f"{name}[0]"] and told[-2].chunks == 1  # type: ignore[attr-defined]


def test_nobodys_answer_changes_nothing(keeper: StateKeeper, told: list[Event]) -> None:
    fetch(keeper)
    (log,) = told
    assert keeper.epoch == 0 and isinstance(log, Log)
    assert log.message == "the swarm's state was not taken: none of 0 peers can hand over a state"


def test_a_signed_state_that_is_not_finite_is_not_kept(keeper: StateKeeper, told: list[Event]) -> None:
    fetch(keeper, state(6))
    del told[:]
    sent = state(7)
    next(iter(sent.parameters.values())).view(-1)[0] = float("nan")
    fetch(keeper, sent)
    (log,) = told
    assert isinstance(log, Log) and log.level == "warning" and "holds NaN or infinity" in log.message
    assert (keeper.epoch, handed_over(keeper).digest()) == (6, state(6).digest())


def test_only_trees_of_the_run_are_read(keeper: StateKeeper) -> None:
    assert keeper.read_tree(state(7).tree().manifest()).step == 7
    other = replace(state(7), identity=small_run(**{"run.seed": 9}).identity)
    for sent in (other, trained().state()):
        with pytest.raises(ValueError, match="a state of run"):
            keeper.read_tree(sent.tree().manifest())


def test_a_full_disk_leaves_the_state_in_memory(keeper: StateKeeper, told: list[Event]) -> None:
    folder = folders.checkpoints(RUN)
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    fetch(keeper, state(7))
    assert keeper.epoch == 7
    assert isinstance(told[-1], Log) and told[-1].message.startswith("the state is kept in memory only: cannot save")


def test_the_newest_are_kept_on_the_disk_and_a_few_older_ones(keeper: StateKeeper) -> None:
    for step in range(1, room.KEPT + 13):
        fetch(keeper, state(step))
    kept = sorted(int(path.name[5:13]) for path in folders.checkpoints(RUN).iterdir())
    assert kept[-room.KEPT :] == list(range(13, room.KEPT + 13))
    assert 2 <= len(kept) - room.KEPT <= 4, "older ones, to which the organiser may take the run back"


def test_it_goes_back_to_the_checkpoint_of_an_order(keeper: StateKeeper, told: list[Event]) -> None:
    for step in (3, 4):
        save(folders.checkpoints(RUN), state(step))
    fetch(keeper, state(5))
    keeper.go_back(RollBack(3, state(3).digest(), "", order=1))
    assert (keeper.epoch, keeper.digest) == (3, state(3).digest()) == (3, handed_over(keeper).digest())
    assert StateKeeper(RUN, told.append).epoch == 3
    later = SwarmState.of([record("a", epoch=4, digest="aa")])
    assert keeper.wants(later)


def test_without_the_checkpoint_of_an_order_it_holds_nothing_until_somebody_has_it(keeper: StateKeeper) -> None:
    fetch(keeper, state(5))
    keeper.go_back(RollBack(3, state(3).digest(), "", order=1))
    assert keeper.hand_over() is None and keeper.epoch == 0
    assert keeper.wants(SwarmState.of([record("a", epoch=3, digest=state(3).digest())]))
    fetch(keeper, state(3))
    assert keeper.epoch == 3

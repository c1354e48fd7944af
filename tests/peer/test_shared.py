"""The state that all members hold alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from peer.states import gradients, layers, small_run, trained

from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.peer.trained_state import StateLost, TrainedState
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import RolledBack


def test_it_begins_with_the_models_weights_as_a_copy() -> None:
    model = layers()
    state = TrainedState(small_run(), model, None)
    assert state.epoch == 0
    assert state.shapes() == {name: parameter.shape for name, parameter in model.named_parameters()}
    before = state.digest
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert state.state().digest() == before == state.digest


def test_equal_gradients_give_equal_bytes_and_others_do_not() -> None:
    one, two, other = trained(), trained(), trained(seed=1)
    assert one.digest == two.digest != other.digest
    for step in range(3):
        before = one.digest
        facts = one.step(gradients(one, step))
        assert two.step(gradients(two, step)) == facts
        assert facts.learning_rate > 0 and facts.gradient_norm > 0
        assert one.epoch == two.epoch == step + 1
        assert before != one.digest == two.digest == one.state().digest()
    one.step(gradients(one, 3))
    two.step(gradients(two, 4))
    assert one.digest != two.digest


def test_a_state_is_taken_over_bit_for_bit_and_trains_on_alike() -> None:
    ahead, behind = trained(steps=3), trained(seed=1, steps=1)
    behind.patch(*handed_over(ahead, behind))
    assert (behind.epoch, behind.digest) == (3, ahead.digest) == (3, behind.state().digest())
    for state in (ahead, behind):
        state.step(gradients(state, 9))
    assert behind.digest == ahead.digest


def test_what_differs_at_the_same_step_is_mended_by_its_chunks_alone() -> None:
    good, other = trained(steps=2), trained(steps=2)
    other.state().parameters["0.weight"][3, 5] += 1
    other.state().optimizer["m.codes/0.weight"][7] ^= 1
    other = TrainedState(small_run(), layers(), other.snapshot())
    tree, chunks = handed_over(good, other)
    assert [tree.name_of(index) for index in chunks] == ["0.weight[0]", "m.codes/0.weight[0]"]
    other.patch(tree, chunks)
    assert other.digest == good.digest == other.state().digest()


def test_the_tree_is_that_of_the_present_state() -> None:
    state = trained(steps=1)
    assert state.tree.digest == state.digest == state.state().digest()
    assert state.read_tree(state.tree.manifest()).digest == state.digest
    before = state.tree
    state.step(gradients(state, 1))
    assert (before.step, state.tree.step) == (1, 2) and state.tree.digest == state.state().digest()


def test_a_backup_is_where_it_goes_on() -> None:
    before = trained(steps=2)
    after = TrainedState(small_run(), layers(seed=1), before.snapshot())
    assert (after.epoch, after.digest) == (2, before.digest)
    for state in (before, after):
        state.step(gradients(state, 9))
    assert after.digest == before.digest


def test_a_snapshot_stays_as_it_is_while_training_goes_on() -> None:
    state = trained(steps=1)
    snapshot, digest = state.snapshot(), state.digest
    state.step(gradients(state, 1))
    assert snapshot.digest() == digest != state.digest


def test_the_model_gets_the_parameters() -> None:
    state, model = trained(steps=2), layers(seed=1)
    state.copy_into(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state.state().parameters[name])


def handed_over(donor: TrainedState, taker: TrainedState) -> tuple[StateTree, dict[int, memoryview]]:
    """What a taker gets of a donor's state: the tree, and the chunks that differ from its own."""
    buffer = StateBuffer.new()
    tree = donor.read_tree(donor.write_into(buffer.write).manifest())
    return tree, {i: chunk(tree, buffer, i) for i in tree.differing(taker.tree)}


def chunk(tree: StateTree, buffer: StateBuffer, index: int) -> memoryview:
    offset, size = tree.place(index)
    return buffer.view(tree.nbytes)[offset : offset + size]


def signed(change: Callable[[TrainingState], object]) -> tuple[StateTree, dict[int, memoryview]]:
    """A state that was changed before it was hashed, and all its chunks."""
    state = trained(steps=2).snapshot()
    change(state)
    tree, buffer = state.tree(), StateBuffer.new()
    state.write_into(tree, buffer.write)
    return tree, {i: chunk(tree, buffer, i) for i in range(len(tree))}


@pytest.mark.parametrize(
    ("change", "on_the_way", "words"),
    [
        (lambda s: s.optimizer["v.absmax/0.weight"].fill_(-1), len, r"v\.absmax/0\.weight\[0\] has negative elements"),
        (lambda s: s.parameters["0.weight"].fill_(math.nan), len, r"0\.weight\[0\] is not finite"),
        (lambda s: s.optimizer["m/0.bias"].fill_(math.inf), len, r"m/0\.bias\[0\] is not finite"),
        (lambda s: s.optimizer.clear(), len, "other tensors"),
        (lambda s: s.optimizer.update({"v/more": torch.zeros(3)}), len, "other tensors"),
        (id, lambda chunks: chunks.pop(2), r"1 of \d+ chunks are missing, 1\.bias\[0\] first"),
        (id, lambda chunks: chunks.update({2: bytes(len(chunks[2]))}), r"1\.bias\[0\] is not what its hash says"),
        (id, lambda chunks: chunks.update({2: chunks[2][:-4]}), r"1\.bias\[0\] is not what its hash says"),
        (id, lambda chunks: chunks.update({0: chunks[1], 1: chunks[0]}), "is not what its hash says"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing_though_it_were_signed(
    change: Callable[[TrainingState], object], on_the_way: Callable[[dict[int, memoryview]], object], words: str
) -> None:
    state = trained(seed=1, steps=1)
    before, digest = state.snapshot(), state.digest
    tree, chunks = signed(change)
    on_the_way(chunks)
    with pytest.raises(ValueError, match=words) as caught:
        state.patch(tree, chunks)
    assert "\n" not in str(caught.value)
    assert (state.epoch, state.digest, state.state().digest()) == (1, digest, before.digest())


@pytest.mark.parametrize(
    "other", [lambda: trained(steps=2, run=small_run(**{"run.seed": 7})), lambda: trained(steps=2, width=264)]
)
def test_a_tree_of_another_run_or_model_is_not_read(other: Callable[[], TrainedState]) -> None:
    with pytest.raises(ValueError, match="a state of run|other tensors than this model's"):
        trained().read_tree(other().tree.manifest())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("parameters", "0.weight", float("nan")),
        ("parameters", "1.bias", float("inf")),
        ("optimizer", "m.absmax/0.weight", float("nan")),
        ("optimizer", "m/1.bias", float("-inf")),
    ],
)
def test_damaged_memory_rolls_back_to_the_newest_backup(kind: str, name: str, value: float) -> None:
    kept = trained(steps=2).snapshot()
    state = TrainedState(small_run(), layers(), kept, lambda: kept)
    state.step(gradients(state, 7))
    getattr(state.state(), kind)[name].view(-1)[-1] = value
    with pytest.raises(RolledBack, match="before step 4") as told:
        state.step(gradients(state, 8))
    assert name.rsplit("/", maxsplit=1)[-1] in str(told.value)
    assert (state.epoch, state.digest) == (2, kept.digest()) == (2, state.state().digest())
    healthy = trained(steps=2)
    for one in (state, healthy):
        one.step(gradients(one, 9))
    assert state.digest == healthy.digest


def test_damaged_memory_without_a_backup_ends_the_peer() -> None:
    state = trained(steps=1)
    state.state().parameters["0.weight"][0, 0] = float("nan")
    with pytest.raises(StateLost, match="there is no backup"):
        state.step(gradients(state, 1))

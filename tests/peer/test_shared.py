"""The state that all members hold alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peer.states import gradients, layers, small_run, trained

from tt_cli.checkpoint import TrainingState, pack
from tt_cli.peer.shared import TrainedState


def anyone(epoch: int, digest: str) -> bool:
    return True


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


def test_a_packed_state_is_adopted_bit_for_bit_and_trains_on_alike() -> None:
    ahead, behind = trained(steps=3), trained(seed=1, steps=1)
    asked = []

    def signed(epoch: int, digest: str) -> bool:
        asked.append((epoch, digest))
        return True

    behind.adopt(ahead.pack(), signed)
    assert asked == [(3, ahead.digest)]
    assert (behind.epoch, behind.digest) == (3, ahead.digest)
    assert behind.pack() == ahead.pack()
    for state in (ahead, behind):
        state.step(gradients(state, 9))
    assert behind.digest == ahead.digest


def test_its_size_is_known_before_it_is_packed() -> None:
    state = trained(steps=1)
    assert state.nbytes() < len(state.pack()) < 1.05 * state.nbytes() + 2**14


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


def changed(change: Callable[[TrainingState], TrainingState]) -> bytes:
    return pack(change(trained(steps=2).snapshot()))


def without_moments(state: TrainingState) -> TrainingState:
    return replace(state, optimizer={})


def with_a_negative_scale(state: TrainingState) -> TrainingState:
    name = next(name for name in state.optimizer if name.startswith("v.absmax"))
    state.optimizer[name][0] = -1.0
    return state


def without_a_parameter(state: TrainingState) -> TrainingState:
    state.parameters.popitem()
    return state


def in_half_precision(state: TrainingState) -> TrainingState:
    return replace(state, parameters={name: tensor.half() for name, tensor in state.parameters.items()})


def with_nan(state: TrainingState) -> TrainingState:
    next(iter(state.parameters.values()))[0] = float("nan")
    return state


REFUSED = {
    "no bytes": lambda: b"",
    "random bytes": lambda: bytes(range(256)) * 50,
    "torn": lambda: trained(steps=2).pack()[:-1],
    "one bit": lambda: flipped(trained(steps=2).pack()),
    "another run": lambda: trained(steps=2, run=small_run(**{"run.seed": 7})).pack(),
    "another model": lambda: trained(steps=2, width=264).pack(),
    "no moments": lambda: changed(without_moments),
    "a negative scale": lambda: changed(with_a_negative_scale),
    "a parameter less": lambda: changed(without_a_parameter),
    "half precision": lambda: changed(in_half_precision),
    "NaN": lambda: changed(with_nan),
}


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_state_that_does_not_fit_changes_nothing_though_it_were_signed(kind: str) -> None:
    state = trained(seed=1, steps=1)
    before = state.pack()
    with pytest.raises(ValueError) as caught:
        state.adopt(REFUSED[kind](), anyone)
    assert "\n" not in str(caught.value)
    assert (state.epoch, state.digest, state.pack()) == (1, state.state().digest(), before)


def test_a_state_that_nobody_signed_changes_nothing() -> None:
    state, other = trained(steps=1), trained(steps=2)
    before = state.pack()
    with pytest.raises(ValueError, match="step 2 that no member signed"):
        state.adopt(other.pack(), lambda epoch, digest: (epoch, digest) == (2, state.digest))
    assert state.pack() == before

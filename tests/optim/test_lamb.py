"""The 8-bit LAMB against plain LAMB in double precision, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import PlainLamb, Settings, normal
from torch import Tensor

from tt_cli.errors import TTError, UsageError
from tt_cli.optim.kernels import PortableLamb
from tt_cli.optim.lamb import CHUNK, Lamb8bit, NonFiniteGradient
from tt_cli.optim.lamb_numba import NumbaLamb


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def small_model(seed: int = 0) -> dict[str, Tensor]:
    return {
        "large.weight": normal(seed, 300, 250, scale=0.02),  # 8-bit, and its last block is not full
        "small.weight": normal(seed + 1, 30, 40, scale=0.1),
        "small.bias": normal(seed + 2, 40, scale=0.1),
        "scale": torch.ones(7),
    }


def gradients_like(parameters: dict[str, Tensor], seed: int, scale: float = 1e-2) -> dict[str, Tensor]:
    return {name: normal(seed + i, *p.shape, scale=scale) for i, (name, p) in enumerate(parameters.items())}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def test_updates_follow_plain_lamb_over_many_steps() -> None:
    parameters = small_model()
    reference = PlainLamb(parameters, Settings())
    optimizer = Lamb8bit(parameters, Settings())
    for step in range(12):
        gradients = gradients_like(parameters, 100 * step)
        before = clone(parameters)
        updates = reference.step(gradients, 1e-2)
        report = optimizer.step(gradients, 1e-2)
        for name, update in updates.items():
            limit = 0.04 if name == "large.weight" else 1e-3
            assert relative(before[name] - parameters[name], update) < limit, (step, name)
        total = math.sqrt(sum(float(u.norm()) ** 2 for u in updates.values()))
        assert report.update_norm == pytest.approx(total, rel=1e-2)
    assert relative(parameters["large.weight"], reference.parameters["large.weight"]) < 2e-3


def test_converges_like_plain_lamb() -> None:
    inputs, target = normal(0, 200, 300), normal(1, 300, 256)
    parameters = {"weight": normal(2, 300, 256, scale=0.5), "bias": torch.zeros(256)}
    reference = PlainLamb(parameters, Settings())
    optimizer = Lamb8bit(parameters, Settings())

    def loss_and_gradients(weight: Tensor, bias: Tensor) -> tuple[float, dict[str, Tensor]]:
        error = inputs @ (weight - target) + bias
        gradients = {"weight": inputs.T @ error / len(inputs), "bias": error.mean(0)}
        return float(error.pow(2).mean()), gradients

    first = loss_and_gradients(**parameters)[0]
    for step in range(60):
        rate = 0.1 * (1 - step / 60)
        ours, gradients = loss_and_gradients(**parameters)
        optimizer.step(gradients, rate)
        theirs, gradients = loss_and_gradients(**{n: p.float() for n, p in reference.parameters.items()})
        reference.step(gradients, rate)
    assert ours < first / 20
    assert ours == pytest.approx(theirs, rel=0.03)


def test_clips_all_tensors_together() -> None:
    parameters = {"a.weight": torch.ones(3), "b.weight": torch.ones(4)}
    optimizer = Lamb8bit(parameters, Settings())
    report = optimizer.step({"a.weight": torch.full((3,), 6.0), "b.weight": torch.full((4,), 8.0)}, 0.0)
    assert report.gradient_norm == pytest.approx(math.sqrt(3 * 36 + 4 * 64))
    assert report.clip_factor == pytest.approx(4 / report.gradient_norm, rel=1e-6)
    state = optimizer.state_dict()
    assert state["m/a.weight"].tolist() == pytest.approx([0.1 * 6 * report.clip_factor] * 3)
    assert state["v/b.weight"].tolist() == pytest.approx([0.04 * (8 * report.clip_factor) ** 2] * 4)


def test_only_names_that_end_in_bias_are_free_of_weight_decay() -> None:
    names = ["layer.bias", "norm.weight", "bias.weight"]
    parameters = {name: torch.full((4,), 0.5) for name in names}
    Lamb8bit(parameters, Settings()).step({name: torch.zeros(4) for name in names}, 1e-3)
    assert parameters["layer.bias"].tolist() == [0.5] * 4
    # u = 0.045 p, trust = |p| / |u|, so the step is lr * p
    for name in names[1:]:
        assert parameters[name].tolist() == pytest.approx([0.5 * (1 - 1e-3)] * 4)


def test_parameters_at_zero_take_an_unscaled_step() -> None:
    parameters = {"weight": torch.zeros(5)}
    Lamb8bit(parameters, Settings()).step({"weight": torch.full((5,), 0.1)}, 1e-2)
    # m / sqrt(v) = 0.1 g / (0.2 g)
    assert parameters["weight"].tolist() == pytest.approx([-0.5e-2] * 5, rel=1e-3)


@pytest.mark.parametrize("kernels", [PortableLamb(), NumbaLamb()], ids=["portable", "compiled"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing(value: float, kernels: PortableLamb | NumbaLamb) -> None:
    parameters = small_model()
    optimizer = Lamb8bit(parameters, Settings(), kernels)
    optimizer.step(gradients_like(parameters, 3), 1e-2)
    kept, state = clone(parameters), clone(optimizer.state_dict())
    gradients = gradients_like(parameters, 4)
    gradients["small.weight"][29, 39] = value
    untouched = clone(gradients)
    with pytest.raises(NonFiniteGradient, match=r"small\.weight is not finite: the step was not taken"):
        optimizer.step(gradients, 1e-2)
    for name in parameters:
        assert torch.equal(parameters[name], kept[name])
        assert torch.equal(gradients[name].nan_to_num(), untouched[name].nan_to_num())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state_dict().items())


def test_the_largest_finite_gradients_are_clipped_not_refused() -> None:
    parameters = {"weight": normal(0, 256, 256)}
    optimizer = Lamb8bit(parameters, Settings())
    report = optimizer.step({"weight": torch.full((256, 256), 3e38)}, 1e-2)
    assert math.isfinite(report.gradient_norm) and math.isfinite(report.update_norm)
    assert bool(torch.isfinite(parameters["weight"]).all())


def test_a_tiny_update_of_large_parameters_is_no_nan() -> None:
    """The trust ratio is 1e40, and all elements of the update but one are zeros."""
    parameters = {"bias": torch.full((4,), 1e4)}
    Lamb8bit(parameters, Settings()).step({"bias": torch.tensor([1e-41, 0.0, 0.0, 0.0])}, 1.0)
    assert parameters["bias"].tolist()[1:] == [1e4] * 3 and math.isfinite(parameters["bias"][0])


@pytest.mark.parametrize("block_size", [100, 3 * 64, 2 * CHUNK])
def test_refuses_blocks_that_do_not_fit_into_its_chunks(block_size: int) -> None:
    with pytest.raises(UsageError, match=f"block_size = {block_size}: must be a power of two"):
        Lamb8bit({"weight": torch.ones(2)}, Settings(block_size=block_size))


@pytest.mark.parametrize("rate", [-1e-3, math.nan, math.inf])
def test_refuses_an_impossible_learning_rate(rate: float) -> None:
    optimizer = Lamb8bit({"weight": torch.ones(2)}, Settings())
    with pytest.raises(ValueError, match="learning rate"):
        optimizer.step({"weight": torch.ones(2)}, rate)


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({}, "no or unknown gradient: weight"),
        ({"weight": torch.ones(2, 3), "more": torch.ones(1)}, "no or unknown gradient: more"),
        ({"weight": torch.ones(3, 2)}, r"shape \(3, 2\), not \(2, 3\)"),
        ({"weight": torch.ones(2, 3, dtype=torch.float16)}, "float16"),
        ({"weight": torch.ones(3, 2).T}, "strides"),
    ],
)
def test_refuses_gradients_that_do_not_fit(gradients: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lamb8bit({"weight": torch.ones(2, 3)}, Settings()).step(gradients, 1e-3)


def test_the_order_of_the_parameters_does_not_matter() -> None:
    ours, theirs = small_model(), dict(reversed(small_model().items()))
    for parameters in (ours, theirs):
        optimizer = Lamb8bit(parameters, Settings())
        for step in range(3):
            gradients = gradients_like(ours, step)
            optimizer.step({name: gradients[name] for name in parameters}, 1e-2)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_restored_optimizer_goes_on_with_the_same_bytes() -> None:
    parameters = small_model()
    optimizer = Lamb8bit(parameters, Settings())
    optimizer.step(gradients_like(parameters, 1), 1e-2)
    others = clone(parameters)
    restored = Lamb8bit(others, Settings())
    state = clone(optimizer.state_dict())
    assert {"m.codes/large.weight", "v.absmax/large.weight", "m/small.bias"} <= state.keys()
    assert len(state) == 4 + 3 * 2
    restored.load_state_dict(state)
    for step in (2, 3):
        optimizer.step(gradients_like(parameters, step), 1e-2)
        restored.step(gradients_like(parameters, step), 1e-2)
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)
    for name, tensor in restored.state_dict().items():
        assert tensor.numpy().tobytes() == optimizer.state_dict()[name].numpy().tobytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.pop("m/small.bias"), "incomplete: m/small.bias missing"),
        (lambda state: state.update({"m/other": torch.zeros(1)}), "m/other unknown"),
        (
            lambda state: state.update({"v/scale": torch.zeros(8)}),
            r"v/scale is torch.float32 \(8,\), expected torch.float32 \(7,\)",
        ),
        (
            lambda state: state.update({"m.codes/large.weight": state["m.codes/large.weight"].to(torch.int16)}),
            "expected torch.uint8",
        ),
        (lambda state: state["m.absmax/large.weight"].fill_(math.nan), "m.absmax/large.weight is not finite"),
        (lambda state: state["v/scale"].fill_(-1e-9), "v/scale has negative"),
        (lambda state: state["m.absmax/large.weight"].fill_(-1e-9), "m.absmax/large.weight has negative"),
    ],
)
def test_refuses_a_state_that_does_not_fit_and_keeps_its_own(
    damage: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    parameters = small_model()
    optimizer = Lamb8bit(parameters, Settings())
    optimizer.step(gradients_like(parameters, 1), 1e-2)
    kept = clone(optimizer.state_dict())
    other = clone(kept)
    other["m/small.weight"] += 1
    damage(other)
    with pytest.raises(TTError, match=words):
        optimizer.load_state_dict(other)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in optimizer.state_dict().items())


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 3 * 4096 + 1),
    p_scale=st.sampled_from([0.0, 1e-8, 1e-2, 1.0, 1e6]),
    g_scale=st.sampled_from([0.0, 1e-40, 1e-20, 1e-4, 1.0, 1e30]),
    block_size=st.sampled_from([64, 256, 4096]),
)
def test_an_update_is_finite_and_as_long_as_the_trust_ratio_says(
    count: int, p_scale: float, g_scale: float, block_size: int
) -> None:
    parameters = {"weight": normal(count, count, scale=p_scale)}
    before = parameters["weight"].clone()
    optimizer = Lamb8bit(parameters, Settings(min_8bit_size=1, block_size=block_size))
    for step in range(2):
        report = optimizer.step({"weight": normal(count + step + 1, count, scale=g_scale)}, 1e-2)
        assert bool(torch.isfinite(parameters["weight"]).all())
        if report.parameter_norm > 0 and report.update_norm > 0:
            assert report.update_norm == pytest.approx(1e-2 * min(report.parameter_norm, 1e4), rel=1e-5)
    if p_scale == 0 and g_scale == 0:
        assert torch.equal(parameters["weight"], before)

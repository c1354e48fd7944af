"""The outer step: one product and one difference, on every machine the same."""

from __future__ import annotations

import numpy
import pytest
import torch
from optim.settings import normal
from torch import Tensor

from tt_cli.errors import TTError
from tt_cli.optim.kernels import PortableLamb
from tt_cli.optim.lamb import NonFiniteGradient, NonFiniteState
from tt_cli.optim.lamb_numba import NumbaLamb
from tt_cli.optim.outer_step import OuterStep
from tt_cli.run.sections import LocalPart

SHAPES = {"b.weight": (700, 500), "a.weight": (333, 3), "b.bias": (333,)}
SETTINGS = LocalPart(name="local", outer_lr=0.7)


def tensors(seed: int) -> dict[str, Tensor]:
    return {name: normal(seed + index, *shape) for index, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("kernels", [PortableLamb, NumbaLamb])
def test_it_is_one_product_and_one_difference(kernels: type[PortableLamb | NumbaLamb]) -> None:
    parameters, ways = tensors(0), tensors(10)
    rate = numpy.float32(0.7)
    expected = {name: parameters[name].numpy() - ways[name].numpy() * rate for name in SHAPES}
    norm = float(torch.cat([way.flatten().double() for way in ways.values()]).norm())
    report = OuterStep(parameters, SETTINGS, kernels()).step(ways, lr=1e-3)
    assert all(parameters[name].numpy().tobytes() == expected[name].tobytes() for name in SHAPES)
    assert report.gradient_norm == pytest.approx(norm)
    assert report.update_norm == pytest.approx(0.7 * norm)


def test_what_is_not_finite_changes_nothing() -> None:
    parameters, ways = tensors(0), tensors(10)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    ways["b.bias"][3] = float("inf")
    with pytest.raises(NonFiniteGradient, match="b.bias"):
        OuterStep(parameters, SETTINGS).step(ways, lr=1e-3)
    assert all(torch.equal(before[name], parameters[name]) for name in SHAPES)
    parameters["a.weight"][0, 0] = float("nan")
    with pytest.raises(NonFiniteState, match="a.weight"):
        OuterStep(parameters, SETTINGS).step(tensors(10), lr=1e-3)


def test_its_state_is_empty_and_unlike_that_of_lamb() -> None:
    outer = OuterStep(tensors(0), SETTINGS)
    outer.load_state_dict(outer.state_dict())
    assert sum(tensor.nbytes for tensor in outer.state_dict().values()) == 0
    for other in ({"m/b.bias": torch.zeros(333)}, {"outer": torch.zeros(1)}):
        with pytest.raises(TTError, match="moments"):
            outer.load_state_dict(other)

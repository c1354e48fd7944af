"""The compiled and the portable arithmetic give the same bytes, whatever the numbers."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import Settings, normal
from torch import Tensor

from tt_cli.optim.blockwise import BlockwiseMoment, LambStep, dynamic_map, parts
from tt_cli.optim.kernels import PortableLamb
from tt_cli.optim.lamb import Lamb8bit
from tt_cli.optim.lamb_numba import NumbaLamb

STEP = LambStep(clip_factor=1.0, beta1=0.9, beta2=0.96, eps=1e-6, decay=0.0)
KERNELS = (PortableLamb(), NumbaLamb())
TINY = 1.4e-45  # the smallest denormal number of fp32


def bytes_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def numbers(seed: int, count: int, scale: float, kind: str) -> Tensor:
    """fp32 numbers: normal, of very unlike size, mostly zero, or denormal and zero of both signs."""
    draws = numpy.random.Generator(numpy.random.PCG64(seed))
    values = draws.standard_normal(count) * scale
    if kind == "unlike":
        values *= numpy.exp(draws.normal(0, 5, count))
    elif kind == "sparse":
        values *= draws.random(count) < 0.05
    elif kind == "denormal":
        values = draws.integers(-3, 4, count) * TINY * draws.choice([1.0, -1.0], count)
    return torch.from_numpy(values.clip(-1e37, 1e37).astype(numpy.float32))


@settings(max_examples=60, deadline=None)
@given(
    count=st.one_of(st.integers(1, 9000), st.sampled_from([4096, 8192, 3 * 4096 + 1])),
    p_scale=st.sampled_from([0.0, 1e-42, 1e-8, 0.02, 1e6]),
    g_scale=st.sampled_from([0.0, 1e-42, 1e-20, 1e-4, 1.0, 1e30]),
    kind=st.sampled_from(["normal", "unlike", "sparse", "denormal"]),
    block_size=st.sampled_from([64, 1024, 4096, 8192]),
    min_8bit_size=st.sampled_from([1, 2000]),
    weight_decay=st.sampled_from([0.0, 0.045]),
    name=st.sampled_from(["weight", "bias"]),
)
def test_both_give_the_same_bytes(
    count: int,
    p_scale: float,
    g_scale: float,
    kind: str,
    block_size: int,
    min_8bit_size: int,
    weight_decay: float,
    name: str,
) -> None:
    part = Settings(block_size=block_size, min_8bit_size=min_8bit_size, weight_decay=weight_decay)
    runs = []
    for kernels in KERNELS:
        parameters = {name: numbers(count, count, p_scale, "normal"), "a": numbers(1, 77, p_scale, kind)}
        optimizer = Lamb8bit(parameters, part, kernels)
        steps: list[object] = []
        for step in range(3):
            gradients = {key: numbers(step, len(p), g_scale, kind) for key, p in parameters.items()}
            steps.append(optimizer.step(gradients, 0.01))
            steps.append(bytes_of(parameters))
            steps.append(bytes_of(optimizer.state_dict()))
        runs.append(steps)
    for portable, compiled in zip(*runs, strict=True):
        assert portable == compiled


def test_large_tensors_and_the_papers_settings() -> None:
    """More than one chunk of the portable implementation, a last block that is not full, several tensors."""
    runs = []
    for kernels in KERNELS:
        parameters = {
            "large": normal(0, 2**18 + 70000, scale=0.02),
            "small.bias": normal(1, 333),
            "scale": torch.ones(1),
        }
        optimizer = Lamb8bit(parameters, Settings(), kernels)
        reports = [
            optimizer.step({name: normal(step, *p.shape, scale=0.1) for name, p in parameters.items()}, 0.02)
            for step in range(2)
        ]
        runs.append((reports, bytes_of(parameters), bytes_of(optimizer.state_dict())))
    assert runs[0] == runs[1]


def test_a_state_moves_from_one_implementation_to_the_other() -> None:
    """Steps taken in turns by both, the state handed over each time, end where one alone ends."""

    def gradients(step: int) -> dict[str, Tensor]:
        return {"weight": normal(step, 70000, scale=0.01), "bias": normal(step, 50, scale=0.01)}

    def parameters() -> dict[str, Tensor]:
        return {"weight": normal(0, 70000), "bias": normal(1, 50)}

    alone, moved = parameters(), parameters()
    one = Lamb8bit(alone, Settings(), KERNELS[0])
    two = [Lamb8bit(moved, Settings(), kernels) for kernels in KERNELS]
    for step in range(6):
        one.step(gradients(step), 0.01)
        two[step % 2].load_state_dict(two[1 - step % 2].state_dict())
        two[step % 2].step(gradients(step), 0.01)
    assert bytes_of(alone) == bytes_of(moved)
    assert bytes_of(one.state_dict()) == bytes_of(two[1].state_dict())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values_on_both_sides_of_every_seam(signed: bool) -> None:
    """Around each number at which a new code begins, also where decades meet; by the formula, as the kernel has it."""
    starts = parts(signed).starts()
    assert len(starts) == (128 if signed else 255) and bool((numpy.diff(starts) > 0).all())
    near = (starts[:, None] + numpy.arange(-40, 41)).ravel().clip(0, 0x3F800000).astype(numpy.int32)
    y = near.view(numpy.float32)
    assert bool((numpy.diff(parts(signed).part(numpy.sort(y))) >= 0).all())
    values = numpy.concatenate([y, -y] if signed else [y])
    values = numpy.append(values, numpy.float32(1))  # the scale
    moment = BlockwiseMoment(len(values), block_size=2**15, signed=signed)
    moment.write(0, torch.from_numpy(values), torch.empty(2, len(values)))
    map_ = dynamic_map(signed).numpy().astype(numpy.float64)
    error = numpy.abs(map_[moment.codes.numpy()] - values)
    best = numpy.abs(map_[:, None] - values.astype(numpy.float64)).min(axis=0)
    assert bool((error <= best * (1 + 1e-4)).all())


@pytest.mark.parametrize("kernels", KERNELS, ids=["portable", "compiled"])
@pytest.mark.parametrize("rare", [1e-5, 1e-4, 3e-4])
def test_a_tiny_second_moment_beside_a_large_one_makes_no_large_update(
    kernels: PortableLamb | NumbaLamb, rare: float
) -> None:
    """A rare token's elements have a gradient once, their block's first element always.

    With fp32 moments no update is above the first, 0.1 / sqrt(0.04); with squares read as 0 the second is 0.9 to 27.
    """
    first, second = (BlockwiseMoment(4096, block_size=4096, signed=signed) for signed in (True, False))
    for step in range(8):
        update = torch.full((4096,), rare if step == 0 else 0.0)
        update[0] = 1.0
        kernels.moments_and_update(torch.zeros(4096), update, first, second, STEP)
        assert int(first.codes.min()) > 127 or step, "the first moments do not read as 0"
        assert int(second.codes.min()) >= 1
        assert float(update[1:].abs().max()) <= 0.5


@pytest.mark.parametrize("kernels", KERNELS, ids=["portable", "compiled"])
def test_a_block_of_zeros_reads_as_zeros(kernels: PortableLamb | NumbaLamb) -> None:
    first, second = (BlockwiseMoment(128, block_size=64, signed=signed) for signed in (True, False))
    gradient = torch.zeros(128)
    gradient[64] = 1.0
    for _ in range(2):
        kernels.moments_and_update(torch.zeros(128), gradient.clone(), first, second, STEP)
    for moment in (first, second):
        values = torch.ones(64)
        moment.read(0, values, torch.empty(2, 64))
        assert values.tolist() == [0.0] * 64

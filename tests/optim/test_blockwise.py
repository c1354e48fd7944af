"""8-bit moments and processor-independent sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import normal
from testbed.spawned import python

from tt_cli.optim.blockwise import BlockwiseMoment, dynamic_map
from tt_cli.optim.kernels import warm_up
from tt_cli.optim.sums import SquareSum, add_in_order

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_those_of_bitsandbytes_but_for_the_last_bit(signed: bool) -> None:
    warm_up()  # imports bitsandbytes without its warnings
    from bitsandbytes.functional import create_dynamic_map

    ours, theirs = dynamic_map(signed), create_dynamic_map(signed=signed)
    assert ours.shape == (256,) and bool((ours[1:] > ours[:-1]).all())
    assert torch.allclose(ours, theirs, rtol=3e-7, atol=0)
    assert ours.min() >= (-1 if signed else 0)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 9000),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
    signed=st.booleans(),
    block_size=st.sampled_from([64, 4096]),
)
def test_encoding_keeps_each_element_within_a_step_of_its_block(
    count: int, scale: float, signed: bool, block_size: int
) -> None:
    values = normal(count, count, scale=scale)
    values = values if signed else values.abs()
    moment = BlockwiseMoment(count, block_size=block_size, signed=signed)
    work = torch.empty(2, count)
    moment.write(0, values, work)
    decoded = torch.empty(count)
    moment.read(0, decoded, work)
    for start in range(0, count, block_size):
        block, back = values[start : start + block_size], decoded[start : start + block_size]
        # the widest gap of the maps is 0.9 / 64 (signed) or 0.9 / 128; the CPU kernel rounds 2**-15 coarser
        limit = (0.5 * 0.9 / (64 if signed else 128) + 2**-8) * block.abs().max()
        assert (block - back).abs().max() <= limit


def test_a_new_moment_is_zero() -> None:
    for signed in (True, False):
        moment = BlockwiseMoment(100, block_size=64, signed=signed)
        values = torch.ones(36)
        moment.read(64, values, torch.empty(2, 36))
        assert values.tolist() == [0.0] * 36
        assert dynamic_map(signed)[moment.codes.long()].tolist() == [0.0] * 100


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 20000), scale=st.sampled_from([1e-40, 1e-3, 1e19, 1e37]))
def test_sums_of_squares_are_right(count: int, scale: float) -> None:
    values = normal(count, count, scale=scale)
    ours = add_in_order(0.0, SquareSum(20000).blocks(values))
    assert ours == pytest.approx(math.fsum(x * x for x in values.tolist()), rel=1e-13, abs=0)


def test_a_sum_does_not_see_what_the_buffer_held_before() -> None:
    sums = SquareSum(8192)
    sums.blocks(torch.full((8192,), 7.0))
    assert sums.blocks(torch.full((4097,), 2.0)) == [4 * 4096.0, 4.0]


def test_warming_up_loads_bitsandbytes_without_a_word() -> None:
    """bitsandbytes warns while it is imported; nobody who trains can do anything about it."""
    code = (
        "import sys, warnings, tt_cli.optim.kernels; print('bitsandbytes' in sys.modules); "
        "warnings.simplefilter('default'); tt_cli.optim.kernels.warm_up(); print('bitsandbytes' in sys.modules)"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\nTrue\n", "")

"""Which kernels run here: numba's, where they give the portable ones' bytes on this very machine."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tt_cli.kernel_choice import choose
from tt_cli.optim import kernels as lamb
from tt_cli.optim.lamb_numba import NumbaLamb
from tt_cli.swarm.allreduce.clipping import centered_clip
from tt_cli.swarm.allreduce.clipping.centered_clip_numba import NumbaClip
from tt_cli.swarm.compression import linear8
from tt_cli.swarm.compression.linear8_numba import NumbaLinear8

pytestmark = pytest.mark.slow

KINDS = pytest.mark.parametrize(
    ("room", "compiled"), [(lamb, NumbaLamb), (linear8, NumbaLinear8), (centered_clip, NumbaClip)], ids=str
)


@KINDS
def test_the_compiled_ones_run_where_numba_is(room: Any, compiled: type) -> None:
    chosen = room.implementation.__wrapped__()  # without its memory
    assert (chosen.name, type(chosen.kernels)) == ("compiled", compiled)
    assert "agree with torch to the last bit" in chosen.reason


@KINDS
def test_without_numba_portable_ones_run_and_say_how_to_get_it(
    room: Any, compiled: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    chosen = room.implementation.__wrapped__()
    assert (chosen.name, chosen.reason) == ("portable", "numba is not installed: pip install 'tt-cli[numba]'")
    assert not isinstance(chosen.kernels, compiled)


class OneBitOff(NumbaLamb):
    """Kernels that round one element in another way."""

    def subtract(self, parameter: Tensor, update: Tensor, scale: float) -> None:
        super().subtract(parameter, update, scale)
        parameter.view(torch.int32)[len(parameter) // 2] ^= 1


class RoundsUp(NumbaLinear8):
    """Kernels of which one sum is wrong in its last bit."""

    def add(self, coded: np.ndarray, accumulator: Tensor, weight: np.float32) -> None:
        super().add(coded, accumulator, weight)
        accumulator[-1] = torch.nextafter(accumulator[-1], torch.tensor(torch.inf))


class TakesAll(NumbaLinear8):
    """Kernels that encode what is not finite."""

    def encode(self, values: Tensor, out: np.ndarray) -> bool:
        super().encode(values, out)
        return True


@pytest.mark.parametrize(
    ("room", "portable", "compiled", "fault"),
    [
        (lamb, lamb.PortableLamb, OneBitOff, "parameter"),
        (linear8, linear8.PortableLinear8, RoundsUp, "adding"),
        (linear8, linear8.PortableLinear8, TakesAll, "refusal"),
    ],
)
def test_kernels_that_differ_in_one_bit_are_passed_over(room: Any, portable: type, compiled: type, fault: str) -> None:
    chosen = choose(portable(), f"{__name__}:{compiled.__name__}", room._trial)
    assert (chosen.name, type(chosen.kernels)) == ("portable", portable)
    assert chosen.reason == f"the compiled kernels compute other bytes here ({fault})"

"""When functions are compiled, and the fallback; on a CPU, with the compiler it has. See also test_axial_attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import cpp_builder

from tt_cli.model.layers import fused as room
from tt_cli.model.layers.fused import Fusion, fused


@pytest.fixture
def fusion(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fusion]:
    """Compiling switched on for CPUs, one number at a time: to try out vector units takes the compiler 8 s."""
    state = Fusion(devices={"cpu"})
    monkeypatch.setattr(room, "fusion", state)
    with inductor.patch({"cpp.vec_isa_ok": False}):
        yield state


def test_nothing_is_compiled_on_a_cpu() -> None:
    state = Fusion()
    assert not state.wanted((torch.ones(1),)) and state.reason() == ("eager", "compiling pays where a GPU trains")


def test_drawing_and_checking_compile_nothing_on_a_gpu_either() -> None:
    """Training alone asks for it."""
    assert not Fusion().wanted((torch.empty(1, device="meta"),)) and Fusion().devices == set() == room.fusion.devices


def test_without_a_working_compiler_all_runs_as_it_is(fusion: Fusion) -> None:
    @fused
    def doubled(x: Tensor) -> Tensor:
        return x * 2 + 1

    with inductor.patch({"cpp.cxx": ("/nonexistent/compiler",), "fx_graph_cache": False}):
        assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 3.0))
    assert fusion.failure and "\n" not in fusion.failure
    assert fusion.reason()[0] == "eager" and fusion.failure in fusion.reason()[1]
    assert torch.equal(doubled(torch.zeros(2)), torch.ones(2))  # and nothing is tried again
    assert not fusion.compiled


@pytest.mark.debian
def test_a_failure_at_a_later_shape_is_told_once_and_all_runs_as_it_is(fusion: Fusion) -> None:
    """The compiler may be gone, or the disk full, when a shape is met that needs another graph."""

    @fused
    def doubled(x: Tensor) -> Tensor:
        return x * 2 + 1

    told: list[str] = []
    fusion.warn = told.append
    with inductor.patch({"fx_graph_cache": False}):
        doubled(torch.ones(3))
        assert fusion.compiled == {"doubled"} and not told
        with inductor.patch({"cpp.cxx": ("/nonexistent/compiler",)}):
            for function in vars(cpp_builder).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
            for _ in range(3):
                assert torch.equal(doubled(torch.ones(3, 5)), torch.full((3, 5), 3.0))
    (words,) = told
    assert words.startswith("elementwise kernels run eagerly from now on: compiling failed: ") and "\n" not in words
    assert fusion.reason()[0] == "eager"


@pytest.mark.debian
def test_one_graph_serves_all_micro_batches_from_two_on_and_knows_all_other_sizes(fusion: Fusion) -> None:
    @fused
    def doubled(x: Tensor) -> Tensor:
        return x * 2 + 1

    counters["stats"].clear()
    for size in (2, 3, 8, 64):
        doubled(torch.ones(size, 4))
    assert fusion.failure == "" and counters["stats"]["unique_graphs"] == 1
    doubled(torch.ones(2, 5))
    assert counters["stats"]["unique_graphs"] == 2
    assert fusion.reason()[0] == "compiled"


def test_errors_of_the_function_itself_are_not_hidden(fusion: Fusion) -> None:
    @fused
    def broken(x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)

    with pytest.raises(RuntimeError, match="shape"):
        broken(torch.ones(2, 3))

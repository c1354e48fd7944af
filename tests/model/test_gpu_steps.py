"""Training steps on the stand-in GPU: right devices and dtypes everywhere, no wait; how kernels are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from testbed.spawned import Call, spawned

pytestmark = pytest.mark.debian  # g++

RUNS = ("emoji-demo", "emoji", "dalle")


def step(name: str, changes: dict[str, Any], precision: str, budget: float, device: str, times: int = 1) -> Any:
    """Kernels, waits and copies of one training step; in the process of the stand-in."""
    from testbed import gpu

    from tt_cli.run import load_run

    counter = gpu.training_step(load_run(name).replaced(changes), 2, precision, budget, device=device, times=times)
    return counter.kernels, dict(counter.waits), dict(counter.copies)


def kernels_by_hand() -> list[tuple[str, int, int, int]]:
    """Of operators whose bytes and FLOPs are known."""
    from testbed import gpu
    from torch import ones

    with gpu.fake_gpu(), gpu.OperatorCounter() as counter:
        a, b = ones(4, 8, device="cuda"), ones(8, 16, device="cuda")
        (a @ b).t().add_(ones(1, 4, device="cuda").expand(16, 4))
        a.cpu()
    return [tuple(kernel) for kernel in counter.kernels]


def compiled_kernels() -> dict[str, int]:
    """Launches of compiled functions in a step of the paper's model."""
    from testbed import gpu

    from tt_cli.model.layers.fused import fusion
    from tt_cli.run import load_run

    fusion.devices.add("cuda")
    counter = gpu.training_step(load_run("dalle").replaced({"model.depth": 5}), 2, "bf16")
    assert fusion.failure == ""
    fusion.devices.clear()
    return {name: int(row["launches"]) for name, row in counter.table().items() if name in fusion.compiled}


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    with spawned({"OMP_NUM_THREADS": "1"}) as begin:
        yield begin


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_run_trains_without_a_wait(call: Call, name: str, precision: str) -> None:
    """With nothing kept and with all, reversible or not; masks and angles are copied once, never in a later step."""
    for reversible, budget, device, times in (
        (True, 0, "cuda:1", 1),
        (True, 1e12, "cuda:0", 2),
        (False, 0, "cuda:1", 1),
    ):
        changes = {"model.reversible": reversible, "model.depth": 5}
        kernels, waits, copies = call(step, name, changes, precision, budget, device, times).result()
        assert len(kernels) > 100 and not waits
        assert not copies or times == 1


def test_bytes_and_flops_are_those_of_the_operators(call: Call) -> None:
    by_hand = [("ones", 1, 128, 0), ("ones", 1, 512, 0), ("mm", 1, 128 + 512 + 256, 2 * 4 * 8 * 16)]
    by_hand += [("ones", 1, 16, 0), ("add_", 1, 256 + 16 + 256, 0), ("_to_copy", 1, 256, 0)]
    assert call(kernels_by_hand).result() == by_hand


def test_compiled_functions_count_as_inductors_kernels(call: Call) -> None:
    found = call(compiled_kernels).result()
    assert {"geglu", "geglu_gradient", "_normed", "_add_"} <= set(found)
    assert found["geglu"] == 5  # one kernel in each layer's forward pass

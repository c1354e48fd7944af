"""Training, drawing and the VQGAN on the stand-in GPU: right devices and dtypes, no wait; how kernels are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from testbed.spawned import on_stand_in_gpu

pytestmark = pytest.mark.debian  # g++

RUNS, PRECISIONS = ("emoji-demo", "emoji", "dalle"), ("fp32", "bf16", "fp16")
# reversible, bytes of activations kept, device, steps of which the last one counts
WAYS = ((True, 0, "cuda:1", 1), (True, 1e12, "cuda:0", 2), (False, 0, "cuda:1", 1))
DEPTH = 3  # layers of each kind: axial by rows, by columns, and the last one of another kind
Counted = dict[str, Any]


def steps() -> Iterator[tuple[str, str, tuple[bool, float, str, int]]]:
    """Each run in each precision, in one of the ways: each of these with each run and with each precision once."""
    for index, name in enumerate(RUNS):
        for number, precision in enumerate(PRECISIONS):
            yield name, precision, WAYS[(index + number) % len(WAYS)]


def everything() -> dict[str, Counted]:
    """Kernels, waits and copies by name; for a process of its own, for the stand-in comes before torch."""
    from testbed import gpu

    from tt_cli.model.layers.fused import fusion
    from tt_cli.run import load_run

    def told(counter: gpu.OperatorCounter) -> Counted:
        return {"kernels": counter.kernels, "waits": counter.waits, "copies": counter.copies}

    found = {}
    for name, precision, (reversible, budget, device, times) in steps():
        run = load_run(name).replaced({"model.reversible": reversible, "model.depth": DEPTH})
        found[f"{name} {precision}"] = told(gpu.training_step(run, 2, precision, budget, device=device, times=times))
    run = load_run("dalle").replaced({"model.depth": DEPTH})
    for precision in ("bf16", "fp32"):
        found[f"drawing {precision}"] = told(gpu.drawing_step(run, 2, 3, precision))
    found["vqgan"] = told(gpu.pictures(2))
    found["by hand"] = told(gpu.known_operators())
    fusion.devices.add("cuda")
    found["compiled"] = {**told(gpu.training_step(run, 2, "bf16")), "failure": fusion.failure}
    matmul = gpu.torch.backends.cuda.matmul
    found["sums"] = {
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
    }
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, Counted]:
    return dict(on_stand_in_gpu(__file__))


@pytest.mark.parametrize(("name", "precision", "way"), steps())
def test_every_run_trains_without_a_wait(
    counted: dict[str, Counted], name: str, precision: str, way: tuple[bool, float, str, int]
) -> None:
    """With nothing kept and with all, reversible or not; masks and angles are copied once, never in a later step."""
    step, (*_, times) = counted[f"{name} {precision}"], way
    assert len(step["kernels"]) > 100 and not step["waits"]
    assert times == 1 or not step["copies"]


@pytest.mark.parametrize("what", ["drawing bf16", "drawing fp32", "vqgan"])
def test_a_step_of_drawing_takes_nothing_to_the_host(counted: dict[str, Counted], what: str) -> None:
    assert len(counted[what]["kernels"]) > 20
    assert not counted[what]["waits"] and not counted[what]["copies"]


def test_bytes_and_flops_are_those_of_the_operators(counted: dict[str, Counted]) -> None:
    expected = [("ones", 1, 128, 0), ("ones", 1, 512, 0), ("mm", 1, 128 + 512 + 256, 2 * 4 * 8 * 16)]
    expected += [("ones", 1, 16, 0), ("add_", 1, 256 + 16 + 256, 0), ("_to_copy", 1, 256, 0)]
    assert counted["by hand"]["kernels"] == [list(row) for row in expected]
    assert counted["by hand"]["copies"] == {"cuda to cpu": 1}


def test_a_product_that_is_cut_up_is_summed_in_float32(counted: dict[str, Counted]) -> None:
    assert counted["sums"] == {"bf16": False, "fp16": False}


def test_compiled_functions_count_as_inductors_kernels(counted: dict[str, Counted]) -> None:
    """The last layer is not axial and has attention of its own."""
    assert counted["compiled"]["failure"] == ""
    launches: dict[str, int] = {}
    for name, count, *_ in counted["compiled"]["kernels"]:
        launches[name] = launches.get(name, 0) + count
    assert launches["geglu"] == DEPTH and launches["_geglu_gradient"] == DEPTH  # each a single kernel
    assert launches["_normed"] == DEPTH * 2 * 2 * 2  # two branches, forward and backward, the statistics and the values
    axial = DEPTH - 1
    assert launches["from_lines"] == launches["spread"] == axial
    assert launches["to_lines"] == axial * 2 * 2  # of the text and of the image, forward and again
    short, flash = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"
    assert launches[short] == launches[f"{short}_backward"] == axial * 2  # over lines
    assert launches[flash] == axial * 2 * 2 + 2  # over the text, by text and image; in the last layer by text
    assert launches[f"{flash}_backward"] == (axial * 2 + 1) * 3


if __name__ == "__main__":
    from testbed import gpu  # before torch

    gpu.print_and_leave(everything())

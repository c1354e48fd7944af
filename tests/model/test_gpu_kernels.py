"""Kernels that Inductor makes for GPUs that are not here, as far as their machine code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from testbed.spawned import on_stand_in_gpu

pytestmark = [pytest.mark.debian, pytest.mark.triton]

CAPABILITIES = (75, 80, 86, 89, 90, 120)  # Turing, A100, RTX 30, RTX 40, H100, RTX 50


def kernels(precision: str, folder: Path) -> list[tuple[str, str, int]]:
    """Function, kernel and capability, bytes of machine code: of what a step of the paper's run compiles."""
    from testbed import gpu, gpu_kernels

    from tt_cli.model.layers.fused import fusion
    from tt_cli.run import load_run

    fusion.devices.add("cuda")
    gpu.training_step(load_run("dalle").replaced({"model.depth": 5}), 2, precision)
    assert fusion.failure == "" and set(gpu.CALLS) == fusion.compiled
    sizes = []
    for name, (function, args, kwargs) in gpu.CALLS.items():
        with gpu.fake_gpu():
            code = gpu_kernels.code_of(function, args, kwargs)
        made = gpu_kernels.cubins(code, CAPABILITIES, folder)
        sizes += [(name, f"{kernel} for {capability}", size) for (kernel, capability), size in made.items()]
    return sizes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_kernel_of_a_step_compiles_for_every_gpu(precision: str, tmp_path: Path) -> None:
    sizes = on_stand_in_gpu(__file__, precision, str(tmp_path))
    assert len({name for name, *_ in sizes}) >= 4
    for name, kernel, size in sizes:
        assert size > 0, f"{name}: {kernel}"


if __name__ == "__main__":
    from testbed import gpu  # before torch

    gpu.print_and_leave(kernels(sys.argv[1], Path(sys.argv[2])))

"""Kernels that Inductor makes for GPUs that are not here, as far as their machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.spawned import spawned

pytestmark = [pytest.mark.debian, pytest.mark.triton]

CAPABILITIES = (75, 80, 86, 89, 90, 120)  # Turing, A100, RTX 30, RTX 40, H100, RTX 50


def kernels(precision: str, folder: Path) -> dict[tuple[str, str, int], int]:
    """(function, kernel, capability) → bytes of machine code, of what a step of the paper's run compiles."""
    from testbed import gpu, gpu_kernels

    from tt_cli.model.layers.fused import fusion
    from tt_cli.run import load_run

    fusion.devices.add("cuda")
    gpu.training_step(load_run("dalle").replaced({"model.depth": 5}), 2, precision)
    assert fusion.failure == "" and set(gpu.CALLS) == fusion.compiled
    sizes = {}
    for name, (function, args, kwargs) in gpu.CALLS.items():
        with gpu.fake_gpu():
            code = gpu_kernels.code_of(function, args, kwargs)
        made = gpu_kernels.cubins(code, CAPABILITIES, folder)
        sizes |= {(name, kernel, capability): size for (kernel, capability), size in made.items()}
    return sizes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_kernel_of_a_step_compiles_for_every_gpu(precision: str, tmp_path: Path) -> None:
    with spawned({"OMP_NUM_THREADS": "1"}) as call:
        sizes = call(kernels, precision, tmp_path).result()
    assert len({name for name, _, _ in sizes}) >= 4
    for name, kernel, _ in sizes:
        assert all(sizes[name, kernel, capability] > 0 for capability in CAPABILITIES)

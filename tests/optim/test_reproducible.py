"""The same bytes with and without vector instructions, with one thread and with two, compiled or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

TRAIN = """
import hashlib
import sys
import torch
from optim.settings import Settings, normal
from tt_cli.optim.lamb import Lamb8bit

if sys.argv[1] == "portable":
    from tt_cli.optim.kernels import PortableLamb as Kernels
else:
    from tt_cli.optim.lamb_numba import NumbaLamb as Kernels
print(torch.backends.cpu.get_cpu_capability())
for threads in (1, 2):
    torch.set_num_threads(threads)
    parameters = {
        "a.weight": normal(0, 700, 500, scale=0.02),
        "b.weight": normal(1, 333, 3),
        "b.bias": torch.zeros(333),
    }
    optimizer = Lamb8bit(parameters, Settings(), Kernels())
    reports = []
    for step in range(4):
        gradients = {name: normal(step + 2, *p.shape, scale=0.02) for name, p in parameters.items()}
        reports.append(repr(optimizer.step(gradients, 0.01 / (step + 1))))
    digest = hashlib.sha256("".join(reports).encode())
    for name, tensor in sorted({**parameters, **optimizer.state_dict()}.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    print(digest.hexdigest())
"""


def start(kernels: str, **environment: str) -> subprocess.Popen[str]:
    """Train four steps with one thread and again with two, in an environment that names the processor to be."""
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN, kernels],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_bytes_depend_neither_on_vector_width_nor_on_threads_nor_on_the_implementation(tmp_path: Path) -> None:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    children = {
        width.upper(): start("portable", ATEN_CPU_CAPABILITY=width) for width in ["default", "avx2"] + ["avx512"] * wide
    }
    for target in ["generic", "haswell"] + ["skylake-avx512"] * wide:
        places = {"NUMBA_CACHE_DIR": str(tmp_path / target), "NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": ""}
        children[target] = start("compiled", **places)
    digests: dict[str, list[str]] = {}
    for name, child in children.items():
        printed, errors = child.communicate(timeout=240)
        assert child.returncode == 0, errors
        used, *digests[name] = printed.split()
        assert used == name or name.islower()
    assert {len(found) for found in digests.values()} == {2}
    assert len({digest for found in digests.values() for digest in found}) == 1, digests

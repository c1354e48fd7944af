"""The same bytes with and without vector instructions, with one thread and with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

TRAIN = """
import hashlib
import torch
from optim.settings import Settings, normal
from tt_cli.optim import Lamb8bit

print(torch.backends.cpu.get_cpu_capability())
for threads in (1, 2):
    torch.set_num_threads(threads)
    parameters = {
        "a.weight": normal(0, 700, 500, scale=0.02),
        "b.weight": normal(1, 333, 3),
        "b.bias": torch.zeros(333),
    }
    optimizer = Lamb8bit(parameters, Settings())
    reports = []
    for step in range(4):
        gradients = {name: normal(step + 2, *p.shape, scale=0.02) for name, p in parameters.items()}
        reports.append(repr(optimizer.step(gradients, 0.01 / (step + 1))))
    digest = hashlib.sha256("".join(reports).encode())
    for name, tensor in sorted({**parameters, **optimizer.state_dict()}.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    print(digest.hexdigest())
"""


def start(capability: str) -> subprocess.Popen[str]:
    """Train four steps with one thread and again with two, with torch's kernels for `capability`."""
    environment = dict(os.environ, ATEN_CPU_CAPABILITY=capability)
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_bytes_depend_neither_on_vector_width_nor_on_threads() -> None:
    widths = ["default", "avx2"] + ["avx512"] * (torch.backends.cpu.get_cpu_capability() == "AVX512")
    children = [start(width) for width in widths]
    digests = set()
    for width, child in zip(widths, children, strict=True):
        printed, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
        used, *lines = printed.split()
        assert used == width.upper() and len(lines) == 2
        digests |= set(lines)
    assert len(digests) == 1

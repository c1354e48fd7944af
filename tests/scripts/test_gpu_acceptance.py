"""The acceptance of a GPU, tried out on the CPU: its limits, and parts that every device can show."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.acceptance.__main__ import LIMITS, PARTS, figures_of, missed

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_acceptance"


def test_every_part_has_limits_and_what_was_not_measured_keeps_none() -> None:
    assert set(LIMITS) == set(PARTS)
    assert missed("probe", {"probe_ratio": 0.96}, gpu=True) == []
    assert missed("probe", {"probe_ratio": 0.94}, gpu=True) == ["probe_ratio is 0.94, not 0.95"]
    assert missed("memory", {"account_error": 0.06}, gpu=True) == ["account_error is 0.06, more than 0.05"]
    assert missed("probe", {"probe_ratio": None}, gpu=True) == ["probe_ratio was not measured"]
    assert missed("probe", {"probe_ratio": None}, gpu=False) == []


@pytest.mark.slow
def test_parts_run_on_a_cpu() -> None:
    """The second without the script, which starts a process for each."""
    command = [SCRIPT, "numbers", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    numbers, machine = json.loads(done.stdout), figures_of("machine", "cpu")
    assert done.returncode == 0 and numbers["passed"], done.stdout + done.stderr
    assert machine["versions"]["torch"] and machine["fp32_error"] < 1e-5 and not missed("machine", machine, gpu=False)
    assert numbers["fp32_gradient_error"] == 0.0 < numbers["fp16_gradient_error"] < 0.01


def test_without_a_gpu_or_with_a_wrong_word_it_is_one_line() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith("scripts/gpu_acceptance: torch sees no GPU: install")
    done = subprocess.run([SCRIPT, "speeed"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "no such part: speeed; there are machine, numbers" in done.stderr

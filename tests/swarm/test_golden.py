"""The same gradients lead to the same parameters, today and after every change, here and on other processors.

A change that is meant to alter the arithmetic (codec, order of sums, optimizer) writes the history anew:
`cd tests && python -m swarm.golden_history > swarm/golden_history.txt`. Peers of before and after it must
not meet, so that the run's identity has to change too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "processor",
    [{}, {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}],
    ids=["this processor", "one without vectors"],
)
def test_the_history_of_a_tiny_run(processor: dict[str, str], tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)} if processor else {}
    done = subprocess.run(
        [sys.executable, "-m", "swarm.golden_history"],
        cwd=HERE.parent,
        env={**os.environ, **processor, **cache, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == (HERE / "golden_history.txt").read_text().split()

"""Thousands of schedules of faults, each checked; a failing one is made smaller and printed with its messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.report import table
from simulation.schedule import SCENARIOS, Schedule, run, shrunk

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"calm": 50, "lossy": 100, "crash": 150, "partition": 150, "hang": 150, "everything": 200, "pair": 200}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COUNTS)
def test_no_schedule_breaks_what_the_protocol_promises(scenario: str) -> None:
    for seed in range(COUNTS[scenario]):
        if run(Schedule.drawn(seed, scenario)).violation:
            pytest.fail(table(shrunk(Schedule.drawn(seed, scenario))), pytrace=False)


def test_a_seed_is_the_same_schedule_in_every_process() -> None:
    code = (
        "from simulation.schedule import Schedule, run\n"
        "for name in ('everything', 'liar'):\n"
        "    result = run(Schedule.drawn(7, name))\n"
        "    print(result.digest, result.violation, result.steps, result.seconds, result.messages)\n"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] and "everything" in SCENARIOS

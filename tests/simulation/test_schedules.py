"""Thousands of schedules of faults, each checked; a failing one is made smaller and printed with its messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutants import MUTANTS, changed
from simulation.report import table
from simulation.schedule import Fault, Schedule, run, shrunk

pytestmark = pytest.mark.slow

COUNTS = {
    "calm": 50,
    "lossy": 80,
    "crash": 100,
    "partition": 100,
    "split": 60,
    "hang": 100,
    "everything": 150,
    "pair": 200,
}
FOUND = [  # what broke a promise once: docs/protocol.md, "What the simulator found"
    Schedule(100, "crash", 3, (Fault("crash", (2,), 8.699009075856885, 10.0), Fault("client", (1,)))),
    Schedule(
        15,
        "everything",
        3,
        (
            Fault("cut", (0, 1), 7.602963845742829, 8.380768038112485),
            Fault("stop", (2,), 5.410024416568881, 7.442614833859727),
            Fault("client", (2,)),
        ),
    ),
    Schedule(
        119,
        "everything",
        3,
        (
            Fault("cut", (0, 2), 5.14094942455354, 7.579967274638002, "one way"),
            Fault("crash", (0,), 5.573882584844116, 9.339037830273416, "for good"),
            Fault("slow", (1,), how="20"),
            Fault("client", (2,)),
        ),
    ),
    Schedule(
        74,
        "partition",
        4,
        (
            Fault("cut", (2,), 3.5193038520129694, 8.47691859871333, "one way"),
            Fault("cut", (1, 2), 8.205345285247002, 8.689607258159532),
        ),
    ),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COUNTS)
def test_no_schedule_breaks_what_the_protocol_promises(scenario: str) -> None:
    for seed in range(COUNTS[scenario]):
        if run(Schedule.drawn(seed, scenario)).violation:
            pytest.fail(table(shrunk(Schedule.drawn(seed, scenario))), pytrace=False)


@pytest.mark.parametrize("schedule", FOUND, ids=lambda one: f"{one.scenario} {one.seed}")
def test_what_was_found_stays_mended(schedule: Schedule) -> None:
    result = run(schedule)
    assert not result.violation and result.seconds < 60.0, table(result)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_the_code_of_today(name: str) -> None:
    assert compile(changed(name), name, "exec")


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
    assert said[0] == said[1]

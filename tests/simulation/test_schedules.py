"""Schedules of all scenarios, and those that broke something once; mutants; the simulator itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.machine import run_of
from simulation.mutants import MUTANTS, caught, changed
from simulation.report import first_broken, table
from simulation.scenarios import SCENARIOS
from simulation.schedule import Fault, Schedule, run

pytestmark = pytest.mark.slow

COUNTS = {  # scenario → schedules
    **{"calm": 30, "lossy": 90, "crash": 90, "restart": 90, "partition": 120, "split": 120, "moment": 140},
    **{"long": 10, "hang": 80, "everything": 230, "pair": 200, "local steps": 50, "stall": 20},
    **{"reducer": 60, "backup": 50, "phantoms": 60, "locks": 50, "ballot": 30, "precommit": 60},
    **{"homes": 30, "lying home": 20, "users": 30, "lying user": 30, "orders": 60},
    **{"keepers": 24, "lying keeper": 18, "apart": 3, "auxiliary": 15, "auxiliary orders": 15},
    **{"liar": 60, "donor": 50, "liar of two": 40, "wrong": 40, "leader": 40, "two-faced": 40},
}
AT_ONCE = 30  # schedules of one test, so that workers share them evenly
PIECES = [(name, first) for name, count in COUNTS.items() for first in range(0, count, AT_ONCE)]
AS_DRAWN = 6  # every sixth has as many members as its seed draws, the others are the scenario's smallest swarms
LARGE = {16: 2, 64: 1}  # members → schedules
CAUGHT_SOON = (  # of the mutants; `scripts/simulate --mutants` looks for all
    "commit: averages need no signature",
    "quorum: any minority",
    "catch-up: nobody is ever behind",
    "audit: the guilty are whoever spoke",
)
FOUND = [  # what broke a promise once: docs/searches.md, "What the simulator found"
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
    Schedule(
        156,
        "restart",
        3,
        (
            Fault("cut", (1, 2), 4.081, 7.004),
            Fault("crash", (0,), 6.007, 6.832),
            Fault("crash", (1,), 8.773, 9.587),
            Fault("crash", (0,), 7.617, 9.016, "for good"),
        ),
    ),
    Schedule(25, "liar", 4, (Fault("liar", (2,), how="broken 837297"),)),
    Schedule(0, "calm", 7, tuple(Fault("client", (number,)) for number in range(1, 7))),
    Schedule(
        1080,
        "split",
        5,
        (
            Fault("cut", (0, 2), 2.641641378743724, 2.937179614428745),
            Fault("cut", (0, 2), 3.438427659628864, 3.555274146498532, "one way"),
            Fault("cut", (4,), 4.187628245614894, 4.553781268455134, "one way"),
            Fault("cut", (4,), 4.044247738340423, 4.404234643028763),
        ),
    ),
    Schedule(1100, "hang", 8, (Fault("slow", (5,), how="20"), Fault("slow", (0,), how="20"))),
    Schedule(1126, "moment", 5, (Fault("moment", (0, 1, 2, 4), stop=2.332584674308172, how="rpc_join_group! 9"),)),
    Schedule.drawn(1362, "everything"),
    Schedule.drawn(25, "liar of two"),
    Schedule.drawn(3818, "liar of two"),
    Schedule.drawn(3277, "long"),
    Schedule.drawn(3644, "donor"),
    Schedule.drawn(3980, "donor"),
    Schedule.drawn(3864, "donor"),
    Schedule.drawn(193, "moment"),
    Schedule.drawn(300050, "reducer"),
    Schedule.drawn(320191, "reducer"),
    Schedule.drawn(320217, "liar"),
    Schedule.drawn(320183, "everything"),
    Schedule.drawn(500264, "pair"),
    Schedule.drawn(500392, "locks"),
    Schedule.drawn(500469, "restart"),
    Schedule.drawn(973014, "lying user"),
    Schedule.drawn(973016, "auxiliary"),
    Schedule(155, "lying keeper", 4, (Fault("cut", (0, 3), 3.3528513, 7.0654553, "one way"), Fault("client", (2,)))),
    Schedule(6, "lying keeper", 4, (Fault("liar", (3,), how="two-voiced 6"),)),
    Schedule(
        1125,
        "stall",
        4,
        (
            Fault("stop", (0,), 14.1304370799806, 39.1304370799806, "daemon"),
            Fault("stop", (2,), 11.450771537343208, 15.450771537343208),
            Fault("stop", (1,), 13.27995583118927, 14.27995583118927, "daemon"),
            Fault("stop", (3,), 10.594144217863791, 20.594144217863793),
            Fault("stop", (1,), 24.13852488986498, 30.13852488986498),
        ),
    ),
    Schedule(
        65,
        "orders",
        4,
        (
            Fault("cut", (1, 2, 3), 5.078865031755461, 8.081958191212266),
            Fault("client", (3,)),
            Fault("order", (2,), 6.081053483135538, 6.343835604065485, "back 0.10"),
        ),
    ),
    Schedule(
        69,
        "orders",
        5,
        (
            Fault("cut", (2,), 7.484283900762284, 9.52708361285881, "one way"),
            Fault("client", (3,)),
            Fault("order", (0,), 9.459456058751012, 9.91654214431445, "published 0.57"),
            Fault("defy", (4,)),
        ),
    ),
    Schedule(
        117,
        "orders",
        3,
        (
            Fault("crash", (0,), 8.142577648323325, 10.748332556593315),
            Fault("client", (2,)),
            Fault("stop", (1,), 4.271102103378708, 4.571102103378708),
            Fault("order", (1,), 7.882075654128244, 11.214180512108694, "ban 1"),
        ),
    ),
    Schedule.drawn(170, "orders"),
    Schedule.drawn(985587, "orders"),
    Schedule(
        12,
        "orders",
        3,
        (
            Fault("crash", (0,), 1.7, 1.9),
            Fault("client", (2,)),
            Fault("order", (0,), 4.4, 4.7, "ban 1"),
            Fault("order", (2,), 6.6, 8.4, "pause"),
        ),
    ),
    Schedule(1199, "stall", 4, (Fault("stop", (2,), 2.8052990048097968, 27.805299004809797, "dht"),)),
    Schedule(
        2,
        "ballot",
        4,
        (
            Fault("moment", (0, 1), stop=5.0, how="rpc_settle 28"),
            Fault("cut", (2,), 10.04, 16.0),
            Fault("crash", (0,), 10.1, 10.4, "newest"),
            Fault("crash", (1,), 10.1, 10.4, "newest"),
        ),
    ),
    Schedule(
        985601, "lying home", 4, (Fault("client", (2,)), Fault("client", (1,)), Fault("liar", (3,), how="locks 746832"))
    ),
]
ROOT = Path(__file__).resolve().parents[2]


def schedule_of(scenario: str, seed: int) -> Schedule:
    """Of a small swarm as a rule, which costs less."""
    few = sorted({*SCENARIOS[scenario].sizes})[:2]
    return Schedule.drawn(seed, scenario, few[seed % len(few)] if seed % AS_DRAWN else None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scenario", "first"), PIECES)
def test_no_schedule_breaks_what_the_protocol_promises(scenario: str, first: int) -> None:
    seeds = range(first, min(first + AT_ONCE, COUNTS[scenario]))
    assert not (broken := first_broken(schedule_of(scenario, seed) for seed in seeds)), broken


@pytest.mark.timeout(600)
@pytest.mark.parametrize("members", LARGE)
def test_so_do_swarms_of_many(members: int) -> None:
    for seed in range(LARGE[members]):
        result = run(Schedule.drawn(seed, "large", members))
        assert not result.violation, table(result)


@pytest.mark.parametrize("schedule", FOUND, ids=lambda one: f"{one.scenario} {one.seed}")
def test_what_was_found_stays_mended(schedule: Schedule) -> None:
    """Nor does it last: who began again with a lock on what nobody has any more repeats that for a round's time."""
    result, most = run(schedule), 50.0 + run_of(schedule.members, "mean").swarm.averaging_timeout
    assert not result.violation and result.seconds < most + SCENARIOS[schedule.scenario].seconds, table(result)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_the_code_of_today(name: str) -> None:
    assert compile(changed(name), name, "exec")


@pytest.mark.parametrize("name", CAUGHT_SOON)
def test_bugs_that_are_put_in_are_found(name: str) -> None:
    assert caught(name, most=10)


def test_a_seed_is_the_same_schedule_in_every_process() -> None:
    code = (
        "from simulation.schedule import Schedule, run\n"
        "for name in ('everything', 'liar', 'stall', 'users', 'orders', 'auxiliary'):\n"
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

"""A schedule in words: its seed, its faults, and a table of its messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simulation.schedule import Result, Schedule, run, shrunk
from simulation.virtual import EPOCH

LAST_MESSAGES = 120


def table(result: Result, most: int = LAST_MESSAGES) -> str:
    """What was broken, how to replay it, what went wrong, and the last messages before that."""
    return "\n".join(_lines(result, most))


def first_broken(schedules: Iterable[Schedule]) -> str:
    """The table of the first of these schedules that breaks a promise, made smaller; "" without one."""
    return next((table(shrunk(schedule)) for schedule in schedules if run(schedule).violation), "")


def _lines(result: Result, most: int) -> Iterator[str]:
    schedule = result.schedule
    yield f"{schedule.scenario} {schedule.seed}: {result.violation or 'nothing is broken'}"
    yield f"  scripts/simulate --scenario {schedule.scenario} --seed {schedule.seed} --members {schedule.members}"
    yield f"  {schedule.members} members, {result.steps} steps, {result.seconds:.1f} s, {result.messages} messages"
    for fault in schedule.faults:
        when = f" from {fault.start:.3f} s to {fault.stop:.3f} s" if fault.stop else ""
        yield f"  {fault.kind} {fault.how} {list(fault.about)}{when}".replace("  [", " [")
    if result.log:
        yield f"  {'seconds':>9}  from   to  message"
    for at, source, target, what, fate in result.log[-most:]:
        yield f"  {at - EPOCH:9.3f}  {source:4}  {target:3}  {what} {fate}"

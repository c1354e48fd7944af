"""The learning rate of each global step: linear warm-up, then linear decay to zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.run.sections import SchedulePart


def learning_rate(schedule: SchedulePart, step: int) -> float:
    """The rate of global step `step`, which counts from 0; zero from `total_steps` on.

    The warm-up starts above zero, so that no step is spent at rate 0; its last step has `peak_lr`.
    """
    if step < 0:
        raise ValueError(f"a step counts from 0, not {step}")
    warmup_steps = round(schedule.total_steps * schedule.warmup_fraction)
    if step < warmup_steps:
        return schedule.peak_lr * (step + 1) / warmup_steps
    if step >= schedule.total_steps:
        return 0.0
    return schedule.peak_lr * (schedule.total_steps - step) / (schedule.total_steps - warmup_steps)

"""The choice of what a run averages, by its members' lines: gradients at every step, or what local steps came to.

Both see the same examples: with H local steps a global step takes H times as many, and there are H times fewer of them.
"""

from __future__ import annotations

import math
from typing import Any

from tt_cli.memory.gpus import GPUS, TYPICAL
from tt_cli.memory.report import run_pace
from tt_cli.run import RunConfig
from tt_cli.terminal.format import byte_count, duration, percent

Members = tuple[int, float]
"""The number of them, and the Mbit/s that each one's line sends."""
PEERS, LINE = 16, 20.0  # where nobody says more
BUSY = 0.9  # part of the time in which a device should compute
SHORT = 15.0  # seconds: matchmaking may take as long, so that a shorter round is not what a run waits for
MOST_INNER_STEPS, LEAST_STEPS = 50, 20  # inner steps of a peer, the most that were tried; global steps that remain
RATE, WIDTH = 8e-3, 128  # the best of AdamW on emoji-demo; it falls with the width (Yang et al. 2022)


def inner_steps(run: RunConfig, members: Members) -> int:
    """The least local steps with which devices are BUSY, where `run`, which averages gradients, is not; else 0."""
    pace = run_pace(run, *members)
    if pace.line <= SHORT or pace.busy >= BUSY:
        return 0
    enough = math.ceil(BUSY / (1 - BUSY) * pace.line / pace.device)
    number = min(enough, MOST_INNER_STEPS, run.schedule.total_steps // LEAST_STEPS)
    return number if number > 1 else 0


def suited(run: RunConfig, number: int, members: Members) -> RunConfig:
    """The run with so many inner steps, 0 for none, of each member; its rounds have the time that they need."""
    seconds = run_pace(run, *members).line
    timeout = max(run.swarm.averaging_timeout, min(3600.0, 60.0 * math.ceil(seconds / 30)))  # twice that
    changes: dict[str, Any] = {"swarm.averaging_timeout": timeout}
    if number:
        each = max(1, run.swarm.target_batch_size // (number * members[0]))
        changes |= {"optimizer": {"name": "local", "inner_batch": each}}
        changes |= {"schedule.peak_lr": float(f"{RATE * WIDTH / run.model.dim:.1e}")}
    return run.replaced(changes)


def reason(run: RunConfig, members: Members) -> str:
    """Words for what a run averages, and what comes of it with such members."""
    (peers, mbits), pace, what, after = members, run_pace(run, *members), "gradients are averaged at every step", ""
    if run.optimizer.name == "local":
        what, number = "local steps", run.swarm.target_batch_size / (run.optimizer.inner_batch * peers)
        after = f"after {number:.3g} inner steps of {run.optimizer.inner_batch} examples by each of {peers} peers "
    words = f"Your members send {mbits:g} Mbit/s: {what}; {after}a round moves {byte_count(pace.sent)} up"
    gpu, hourly = GPUS[TYPICAL].title, byte_count(pace.per_hour)
    busy = f"; a {gpu} is busy {percent(pace.busy)} of the time, with {hourly} an hour each way"
    return f"{words} in {duration(pace.line)}{busy if after or pace.line > SHORT else ''}."

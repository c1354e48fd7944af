"""The choice of what a run averages, by its members' lines: gradients at every step, or what local steps came to.

All see the same examples: with H local steps a global step takes H times as many, and there are H times fewer of them.
Of what local steps came to messages have the largest elements: what they leave out comes later, so density, H and the
length of a run are chosen together. Where devices still wait for rounds, inner steps go on beside them, from older
parameters; that fills lines, so it is chosen only there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from tt_cli.memory.gpus import GPUS, TYPICAL
from tt_cli.memory.report import StepPace, pace
from tt_cli.memory.trainer_account import CHUNK, round_bytes
from tt_cli.run import RunConfig
from tt_cli.task import task_of
from tt_cli.terminal.format import byte_count, duration, percent

Members = tuple[int, float]
"""The number of them, and the Mbit/s that each one's line sends."""
PEERS, LINE = 16, 20.0  # where nobody says more
BUSY = 0.9  # part of the time in which a device should compute
SHORT = 15.0  # seconds: matchmaking may take as long, so that a shorter round is not what a run waits for
LONG = 1800.0  # seconds of a round: half of the longest time-out, and members come and go
MOST_INNER_STEPS = 50  # of a peer, the most that were tried
KEPT, TURNS = (512, 256, 128, 64), 22 * 512  # of each 4,096 elements; the least of a whole run that came far enough
BEHIND = 1.5  # rounds by which a run learns later where inner steps go on beside them (emoji-demo)
SPARSE_TENSOR = 1024  # elements from which a tensor is sparse: all others would be most of a message
RATE, WIDTH = 8e-3, 128  # the best of AdamW on emoji-demo; it falls with the width (Yang et al. 2022)


class Way(NamedTuple):
    """Inner steps, 0 for none; elements kept of each 4,096, 0 for all; whether steps go on beside rounds."""

    inner_steps: int
    kept: int
    delayed: bool


def run_pace(run: RunConfig, peers: int, mbits: float) -> StepPace:
    """The pace of a run's peers with a TYPICAL GPU each, and products in 16 bits."""
    task = task_of(run)
    gradient, flops = sum(round_bytes(run, task.tensor_sizes(), peers)) // 2, task.flops() * run.swarm.target_batch_size
    return pace(gradient, flops, peers, mbits, peak=GPUS[TYPICAL].half, waits=not run.optimizer.delayed)


def chosen(run: RunConfig, members: Members, given: int | None = None) -> Way:
    """The way in which a run learns fastest, with `given` inner steps where they are.

    Of inner steps the least with which devices are BUSY, or lines beside them, or the most that leave enough global
    ones; a run that makes them anyway makes so many on any line, for a round takes its matchmaking_time too.
    """
    now, made = run_pace(run, *members), inner_steps(run, members)
    if (now.line <= SHORT and not made) or now.busy >= BUSY:
        return Way(round(made), run.sparse, bool(made) and run.optimizer.delayed)
    made = made or 1
    device, steps, ways = now.device / made, round(run.schedule.total_steps * made), []
    for delayed, kept in itertools.product((False, True), KEPT):
        line = max(run_pace(run.replaced(_messages(kept)), *members).line, run.swarm.matchmaking_time)
        enough = math.ceil(line / device * (1 / BUSY if delayed else BUSY / (1 - BUSY)))
        most = min(MOST_INNER_STEPS, steps // (TURNS // kept))
        number = min(enough, most) if given is None else given
        busy = min(BUSY, number * device / (max(number * device, line) if delayed else number * device + line))
        busy *= min(1.0, LONG / line, most / max(1, number))  # rounds that are seldom whole, and too few of them
        samples = 1 + BEHIND * number / steps if delayed else 1.0
        ways.append((busy / samples, Way(number, kept, delayed)))
    _, way = max(ways, key=lambda each: each[0])
    return way if way.inner_steps > 1 else Way(0, 0, False)


def spread(run: RunConfig, number: int) -> RunConfig:
    """The run with as many examples in so many inner steps to a global one; 0: none."""
    steps, batch, number = run.schedule.total_steps, run.swarm.target_batch_size, max(1, number)
    changes = {"schedule.total_steps": math.ceil(steps / number), "swarm.target_batch_size": batch * number}
    return run.replaced(changes)


def inner_steps(run: RunConfig, members: Members) -> float:
    """Of each of so many members alike, between two global steps."""
    local = run.optimizer
    return run.swarm.target_batch_size / (local.inner_batch * members[0]) if local.name == "local" else 0.0


def _messages(kept: int, inner_batch: int = 1, delayed: bool = False) -> dict[str, Any]:
    """Changes for local steps with such messages."""
    changes = {"optimizer": {"name": "local", "inner_batch": inner_batch, "sparse": kept, "delayed": delayed}}
    return changes | {"swarm.large_tensor": SPARSE_TENSOR} if kept else changes


def suited(run: RunConfig, way: Way, members: Members) -> RunConfig:
    """The run in this way; its rounds have the time that they need."""
    if way.inner_steps:
        batch = max(1, run.swarm.target_batch_size // (way.inner_steps * members[0]))
        changes = _messages(way.kept, batch, way.delayed)
        if run.optimizer.name != "local":  # a rate of another optimizer
            changes |= {"schedule.peak_lr": float(f"{RATE * WIDTH / task_of(run).width:.1e}")}
        run = run.replaced(changes)
    seconds = run_pace(run, *members).line
    timeout = max(run.swarm.averaging_timeout, min(3600.0, 60.0 * math.ceil(seconds / 30)))  # twice that
    return run.replaced({"swarm.averaging_timeout": timeout})


def reason(run: RunConfig, members: Members) -> str:
    """Words for what a run averages, and what comes of it with such members."""
    (peers, mbits), now, what, after = members, run_pace(run, *members), "gradients are averaged at every step", ""
    if run.optimizer.name == "local":
        number = f"{inner_steps(run, members):.3g}"
        what = "local steps" + " that go on beside rounds, for devices would wait for them" * run.optimizer.delayed
        after = f"after {number} inner steps of {run.optimizer.inner_batch} examples by each of {peers} peers "
    if run.sparse:
        whole = duration(run_pace(run.replaced({"optimizer.sparse": 0}), *members).line)
        what += f", and of each 4,096 numbers the largest {run.sparse} sent, for all would take {whole}"
        what += f" (each has {round(run.schedule.total_steps * run.sparse / CHUNK, 1):g} turns in the run)"
    words = f"Your members send {mbits:g} Mbit/s: {what}; {after}a round moves {byte_count(now.sent)} up"
    gpu, hourly = GPUS[TYPICAL].title, byte_count(now.per_hour)
    busy = f"; a {gpu} is busy {percent(now.busy)} of the time, with {hourly} an hour each way"
    return f"{words} in {duration(now.line)}{busy if after or now.line > SHORT else ''}."

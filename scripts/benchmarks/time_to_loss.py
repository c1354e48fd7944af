"""Measure how long four homes take to a loss: by averaged gradients, by local steps that wait, and by delayed ones.

- Each of four trainers is a host of its own (a network namespace, tests/testbed/namespaces.py) on a line of 20 Mbit/s
  down and 5 up; an auxiliary peer is on a host with no limit. Processes, rounds, arithmetic and losses are real.
- The emoji-demo run stands in for the paper's model of 125.9 million parameters: lines are as much slower as it is
  smaller, and a micro-batch takes at least as long as the typical GPU of `tt calc` takes for one of the paper's model.
  So a round lasts as long as the paper's would, beside its device. Then all is --faster: what does not shrink
  (matchmaking, records, the DHT) weighs more, and most where rounds are short.
- `averaging`: the run as it is, 8-bit LAMB on averages of 128 examples or more, of which a peer computes no more while
  it waits than a whole step has. `waiting` and `delayed`: 5 inner steps of 16 examples, messages of 256 of each 4,096.
- Time begins when all four may compute, and ends with the step whose loss is down at the goal, with a fraction, by a
  straight line between the logarithms of the two losses around it. A step's loss is the mean of its examples' before
  it; with local steps of those of all inner steps, before each.

Needs root and iproute2.

    sudo scripts/bench time_to_loss

JSON keys: time_to_loss_20_5: of `waiting` or `delayed`, the faster one, over that of `averaging`; time_to_loss_waiting
and time_to_loss_delayed: each one's. By arm: seconds to the loss, steps, seconds_per_step between the first and the
last one, examples a step, unlike_digests (0 expected), failed_rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.disturbance import need
from testbed.namespaces import Host, Network, need_namespaces

from scripts.benchmarks.convergence import run_of
from scripts.benchmarks.harness import progress
from scripts.benchmarks.local_steps import (
    BATCH,
    INNER_BATCH,
    LOSS,
    MEMBERS,
    PEAK_LR,
    SAMPLES,
    SPARSE,
    SPARSE_STEPS,
    local_run,
    samples_to,
)
from tt_cli.organise.averaging import run_pace
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Listening, Phase, Progress, Round, Step
from tt_cli.supervisor.local_swarm import AUX_MODULE, LocalPeer, LocalSwarm
from tt_cli.task import task_of

DOWN, UP = 20.0, 5.0  # Mbit/s of a home's line
FASTER = 20.0
QUICK, QUICK_FASTER, QUICK_LOSS = "all 400 times as fast, to a loss of 6.72", 400.0, 6.72
NAMES = ("anna", "ben", "cleo", "dora")
START_SECONDS, LONGEST_SECONDS = 240.0, 3600.0


def arms() -> dict[str, RunConfig]:
    """The runs. Their rounds may take as long as a line needs."""
    sparse = {"inner_batch": INNER_BATCH, "sparse": SPARSE}
    runs = {"averaging": run_of(BATCH, 0)}
    for name, delayed in (("waiting", False), ("delayed", True)):
        runs[name] = local_run(0, SPARSE_STEPS, SAMPLES, {**sparse, "delayed": delayed}, PEAK_LR)
    return {name: run.replaced({"swarm.averaging_timeout": 300.0}) for name, run in runs.items()}


def started(swarm: LocalSwarm, hosts: list[Host], upload: float, pace: float) -> list[LocalPeer]:
    """Trainers on hosts of their own, about to compute. upload: Mbit/s of each one's line; pace: of a micro-batch."""
    first, *others = hosts
    with first.entered():
        aux = swarm.start("aux", AUX_MODULE, {"port": 0, "initial_peers": [], "host": first.address})
    need(swarm, lambda: bool(aux.of(Listening)), "the auxiliary peer", [aux], START_SECONDS)
    swarm.addresses = [address for address in aux.of(Listening)[0].addresses if first.address in address]
    options = {"batch_size": INNER_BATCH, "patient": True, "max_upload": upload * 1e6, "pace": pace}
    options["gate"] = str(swarm.folder / "gate")
    trainers = []
    for seed, (name, host) in enumerate(zip(NAMES, others, strict=True)):
        with host.entered():
            trainers.append(swarm.start_trainer(name, host=host.address, seed=seed, **options))

    def ready() -> bool:
        return all(any(event.phase == "training" for event in trainer.of(Phase)) for trainer in trainers)

    need(swarm, ready, "the start of all trainers", trainers, START_SECONDS)
    return trainers


def train(run: RunConfig, folder: Path, faster: float, goal: float) -> dict[str, Any]:
    """One run of four peers, until its loss is down at the goal."""
    paper = load_run("dalle")
    scale = sum(task_of(run).tensor_sizes()) / sum(task_of(paper).tensor_sizes()) * faster
    pace = run_pace(paper.replaced({"swarm.target_batch_size": INNER_BATCH}), 1, UP).device / faster
    with (
        Network(1 + MEMBERS) as network,
        LocalSwarm(run.to_toml(), folder, trainer_module="testbed.peer") as swarm,
    ):
        network.limit(DOWN * scale, *network.hosts[1:])
        trainers = started(swarm, network.hosts, UP * scale, pace)
        began = time.time()
        (folder / "gate").touch()

        def reached() -> bool:
            return any(value <= goal for value in losses(trainers).values())

        need(swarm, reached, f"a loss of {goal:g}", trainers, LONGEST_SECONDS)
        found = losses(trainers)
        digests = {(step.epoch, step.digest) for member in trainers for step in member.of(Step)}
        samples = [max(event.my_samples for event in member.of(Progress)) for member in trainers]
        by_time = {0.0: next(iter(found.values())), **{at - began: value for at, value in found.items()}}
        return {
            "seconds": round(samples_to(by_time, goal) or min(found) - began, 1),  # the latter: with the first step
            "steps": len(found),
            "seconds_per_step": round((max(found) - min(found)) / max(1, len(found) - 1), 2),
            "examples_per_step": round(sum(samples) / len(found)),
            "link_mbit": [round(DOWN * scale, 3), round(UP * scale, 3)],
            "micro_batch_seconds": round(pace, 3),
            "unlike_digests": len(digests) - len({step for step, _ in digests}),
            "failed_rounds": sum(event.outcome in ("failed", "dropped") for m in trainers for event in m.of(Round)),
        }


def losses(trainers: list[LocalPeer]) -> dict[float, float]:
    """When the first of them made each step, and its loss."""
    steps: dict[int, tuple[float, float]] = {}
    for step in (step for member in trainers for step in member.of(Step) if step.loss is not None):
        steps[step.epoch] = min(steps.get(step.epoch, (step.at, step.loss)), (step.at, step.loss))
    return dict(steps[epoch] for epoch in sorted(steps))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--faster", type=float, help=f"than homes are (default {FASTER:g}; quick: {QUICK_FASTER:g})")
    parser.add_argument("--loss", type=float, help=f"the goal (default {LOSS:g}; quick: {QUICK_LOSS:g})")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The three arms, one after the other."""
    need_namespaces()
    faster = args.faster or (QUICK_FASTER if args.quick else FASTER)
    goal = args.loss or (QUICK_LOSS if args.quick else LOSS)
    figures: dict[str, Any] = {"loss": goal, "faster": faster}
    with tempfile.TemporaryDirectory(prefix="bench-time-to-loss-") as scratch:
        for name, run in arms().items():
            figures[name] = train(run, Path(scratch) / name, faster, goal)
            progress("time_to_loss", figures)
    ratios = {
        f"time_to_loss_{name}": round(figures[name]["seconds"] / figures["averaging"]["seconds"], 4)
        for name in ("waiting", "delayed")
    }
    return {"time_to_loss_20_5": min(ratios.values()), **ratios, **figures}

"""Measure a swarm of real peers on this machine: agreement, received parts, joining, dying.

Two swarms run one after the other, each of an auxiliary peer and three trainers in processes of their own, on the
built-in emoji data with a small model:

1. ten global steps with nobody leaving: how far the three peers' parameters differ afterwards (they are read from
   the peers' own backups), what part of every averaged gradient arrived, and how long a peer needs from its start
   to its first gradient in a committed round;
2. one peer is killed with SIGKILL between two steps: which of its processes live on after three seconds, whether
   the others finish their step, and whether it comes back by itself when it is started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.disturbance import compare_states, need, small_run, states_of
from testbed.process_watch import ProcessWatch

from tt_cli.supervisor.events import Contribution, Round, Saved, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.supervisor.processes import family_of

TARGET = 192  # samples of a step
QUICK = "four steps instead of ten, and nobody joins late or comes back"
NAMES = ("anna", "ben", "cleo")


def made(member: LocalPeer, step: int) -> bool:
    """True when this member has made `step`, or taken it over."""
    return any(event.epoch >= step for event in states_of(member))


def measure_agreement(folder: Path, steps: int) -> dict[str, Any]:
    """Three peers, `steps` steps, nobody leaves."""
    with LocalSwarm(small_run(steps, TARGET).to_toml(), folder) as swarm:
        swarm.start_aux()
        started, joined = {}, {}
        for seed, name in enumerate(NAMES):
            started[name] = time.time()
            swarm.start_trainer(name, batch_size=8, seed=seed)
        members = [swarm.members[name] for name in NAMES]
        need(swarm, lambda: all(member.of(Saved) for member in members), f"step {steps} on all peers", members)
        for member in members:
            joined[member.name] = member.of(Contribution)[0].at - started[member.name]
        compared = compare_states(members)
        rounds = [event for member in members for event in member.of(Round) if len(event.members) > 1]
        whole = sorted(event.seconds["whole"] for event in rounds if event.outcome == "committed")
        return {
            "steps": steps,
            "max_parameter_difference": compared["max_parameter_difference"],
            "optimizer_state_equal": not compared["bits_differing"],
            "rounds": len(rounds),
            "received_fraction_min": min(event.received for event in rounds),
            "received_fractions": [round(event.received, 4) for event in rounds],
            "round_median_s": round(whole[len(whole) // 2], 3),
            "join_to_first_gradient_s": round(sum(joined.values()) / len(joined), 2),
            "join_to_first_gradient_each_s": {name: round(value, 2) for name, value in joined.items()},
        }


def measure_late_join(swarm: LocalSwarm, name: str, **options: Any) -> tuple[LocalPeer, float]:
    """Seconds from starting a peer, with the others training, to its first gradient in a committed round."""
    started = time.time()
    member = swarm.start_trainer(name, **options)
    need(swarm, lambda: bool(member.of(Contribution)), f"a first gradient of {name}", [member])
    return member, member.of(Contribution)[0].at - started


def measure_kill(folder: Path, quick: bool) -> dict[str, Any]:
    """SIGKILL one of three peers between two steps; unless `quick`, it joins late and comes back afterwards."""
    with LocalSwarm(small_run(10_000, TARGET).to_toml(), folder) as swarm:
        swarm.start_aux()
        for seed, name in enumerate(NAMES if quick else NAMES[:2]):
            swarm.start_trainer(name, batch_size=8, seed=seed)
        first = [swarm.members[name] for name in NAMES[:2]]
        trainers = [member for member in swarm.members.values() if member.name != "aux"]
        need(swarm, lambda: all(made(member, 2) for member in trainers), "step 2", trainers)
        found: dict[str, Any] = {}
        if not quick:
            _, late = measure_late_join(swarm, NAMES[2], batch_size=8, seed=2)
            found["late_join_to_first_gradient_s"] = round(late, 2)
        victim = swarm.members[NAMES[2]]
        family = family_of(victim.worker.pid)
        watch = ProcessWatch(family)
        reached = max(event.epoch for member in first for event in member.of(Step))
        os.kill(victim.worker.pid, signal.SIGKILL)
        killed = time.time()
        found |= {"processes_of_a_peer": len(family), "orphans_after_kill": len(watch.left_after(3.0))}
        need(swarm, lambda: all(made(member, reached + 2) for member in first), "two more steps without it", first)
        next_step = min(event.at for member in first for event in member.of(Step) if event.epoch > reached) - killed
        found["survivors_next_step_s"] = round(next_step, 2)
        if not quick:
            back, seconds = measure_late_join(swarm, NAMES[2], batch_size=8, seed=3)
            found["return_to_first_gradient_s"] = round(seconds, 2)
            found["returned_at_step"] = back.of(Synchronised)[0].epoch
        return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both swarms."""
    with tempfile.TemporaryDirectory(prefix="bench-swarm-") as scratch:
        agreement = measure_agreement(Path(scratch) / "agreement", 4 if args.quick else 10)
        return agreement | measure_kill(Path(scratch) / "kill", args.quick)

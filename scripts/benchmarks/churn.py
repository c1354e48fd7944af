"""Measure what is left of a swarm's step when a quarter of its peers die in the middle of an all-reduce.

Eight real peers on loopback with a small model, each with an upload so narrow that a transfer takes a second or two.
Two of them, chosen by the seed, are SIGKILLed with all their processes within the transfer of a round: after both have
said that they average, and a part of a second later. They are started again, and another two die, and so on.

- churn_steps_lost: steps that no survivor made, or after which two survivors held unlike states;
- churn_seconds: from a kill until every survivor had made the step that was under way, or taken it over; at most;
- churn_within_round_timeout: whether that was within the run's averaging_timeout;
- churn_most_behind: steps by which a survivor was behind the others when they had made two more steps; at most;
- churn_not_finite: steps whose loss was not finite, and numbers that are not finite in the states saved at the end.

Examples:
  scripts/bench churn --waves 5 --seed 7
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.disturbance import compare_states, digests_of, need, small_run, states_of

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.supervisor.events import Phase, Round, Saved, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

PEERS, VICTIMS = 8, 2
WAVES, QUICK_WAVES = 3, 1
QUICK = f"{QUICK_WAVES} wave instead of {WAVES}"
UPLOAD = 2e6  # bits a second: a round of the small model takes one to two seconds
MICRO_BATCH, PACE, TARGET = 4, 0.5, 160  # 64 samples a second in all: a step in three seconds or so


class Churn:
    """A swarm of real peers in which some die. lives: every process there was, oldest first."""

    def __init__(self, swarm: LocalSwarm, seed: int):
        self.swarm, self.choice = swarm, random.Random(seed)
        self.lives: list[LocalPeer] = []
        self.dead: set[int] = set()  # process ids
        self.seconds: list[float] = []
        self.behind: list[int] = []
        self.died_in_round: list[bool] = []

    def start(self, number: int) -> LocalPeer:
        """One peer, paced: as if each had a device of its own."""
        member = self.swarm.start_trainer(
            f"peer{number}", module="testbed.peer", batch_size=MICRO_BATCH, seed=number, max_upload=UPLOAD, pace=PACE
        )
        self.lives.append(member)
        return member

    @property
    def living(self) -> list[LocalPeer]:
        """Those that were not killed."""
        return [member for member in self.lives if member.worker.pid not in self.dead]

    def all_at(self, step: int, members: list[LocalPeer]) -> None:
        """Wait until each of them holds the state of this step, or a later one."""
        need(self.swarm, lambda: all(step_of(member) >= step for member in members), f"step {step} on all", members)

    def wave(self) -> None:
        """Kill a quarter within a round, see how the others come through, start the dead again."""
        victims = self.choice.sample(self.living, VICTIMS)
        before = {victim.name: len(victim.events) for victim in victims}

        def averaging() -> bool:
            return all(averages(victim, before[victim.name]) for victim in victims)

        need(self.swarm, averaging, "a round of the victims", victims)
        time.sleep(self.choice.uniform(0.0, 0.6))
        for victim in victims:
            os.kill(victim.worker.pid, signal.SIGKILL)
            self.dead.add(victim.worker.pid)
        killed = time.time()
        survivors, step = self.living, max(step_of(victim) for victim in victims) + 1
        self.died_in_round.append(averaging())
        self.all_at(step, survivors)
        self.seconds.append(max(time_of(member, step) for member in survivors) - killed)
        need(self.swarm, lambda: max(map(step_of, survivors)) >= step + 2, f"step {step + 2} on one", survivors)
        self.behind.append(step + 2 - min(map(step_of, survivors)))
        self.all_at(step + 2, survivors)
        again = [self.start(int(victim.name.removeprefix("peer"))) for victim in victims]
        self.all_at(step + 3, [*survivors, *again])

    def facts(self, first: int) -> dict[str, Any]:
        """What became of all steps after `first`. The living have left, and saved their states."""
        digests = digests_of(self.lives)
        losses = [event.loss for member in self.lives for event in member.of(Step) if event.loss is not None]
        last = max(digests)
        missing = {step for step in range(first + 1, last + 1) if step not in digests}
        unlike = {step for step, found in digests.items() if len(found) > 1}
        rounds = [event for member in self.lives for event in member.of(Round)]
        return {
            "churn_steps_lost": len(missing | unlike),
            "churn_steps": last - first,
            "churn_digests_compared": sum(len(states_of(member)) for member in self.lives),
            "churn_not_finite": sum(not math.isfinite(loss) for loss in losses) + sum(map(not_finite, self.living)),
            "churn_rounds_failed": sum(event.outcome == "failed" for event in rounds),
            "churn_rounds_dropped": sum(event.outcome == "dropped" for event in rounds),
        }


def step_of(member: LocalPeer) -> int:
    """The newest step whose state it holds."""
    return max((event.epoch for event in states_of(member)), default=0)


def time_of(member: LocalPeer, step: int) -> float:
    """When it held the state of this step, or of a later one."""
    return min(event.at for event in states_of(member) if event.epoch >= step)


def averages(member: LocalPeer, since: int) -> bool:
    """True while it is in a round that began after its first `since` events."""
    inside = False
    for event in member.events[since:]:
        if isinstance(event, (Round, Step, Synchronised)):
            inside = False
        elif isinstance(event, Phase):
            inside = event.phase == "averaging"
    return inside


def not_finite(member: LocalPeer) -> int:
    """Numbers of its last saved parameters that are not finite."""
    state = load(Path(member.of(Saved)[-1].path))
    return sum(int((~tensor.isfinite()).sum()) for tensor in state.parameters.values())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it; see the head of this file. Ends the script when the swarm does not go on at all."""
    waves = args.waves or (QUICK_WAVES if args.quick else WAVES)
    run = small_run(1000, TARGET)
    with tempfile.TemporaryDirectory(prefix="churn-") as scratch, LocalSwarm(run.to_toml(), Path(scratch)) as swarm:
        swarm.start_aux()
        churn = Churn(swarm, args.seed)
        for number in range(PEERS):
            churn.start(number)
        churn.all_at(1, churn.lives)
        first = max(map(step_of, churn.lives))
        for _ in range(waves):
            churn.wave()
        swarm.leave(*{member.name for member in churn.living})
        living = [member for member in churn.living if member.of(Saved)]
        alike = [m for m in living if m.of(Saved)[-1].epoch == max(x.of(Saved)[-1].epoch for x in living)]
        compared = compare_states(alike)
        facts = churn.facts(first)
    return {
        **facts,
        "churn_waves": waves,
        "churn_killed_in_a_round": sum(churn.died_in_round),
        "churn_seconds": round(max(churn.seconds), 2),
        "churn_within_round_timeout": max(churn.seconds) <= run.swarm.averaging_timeout,
        "churn_most_behind": max(churn.behind),
        "churn_states_compared": compared["states_compared"],
        "churn_bits_differing": compared["bits_differing"],
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--waves", type=int, help=f"how often {VICTIMS} of {PEERS} peers die (default {WAVES})")
    parser.add_argument("--seed", type=int, default=0, help="who dies, and when in the round (default 0)")

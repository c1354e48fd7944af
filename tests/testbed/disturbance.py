"""Peers that come late, are killed, are slow or accept no connections: ours and stock hivemind.Optimizer's.

For scripts/bench equality, which says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbed.launched import Launched
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Phase, Round, Saved, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

BASELINE = "scripts.benchmarks.baselines.hivemind_optimizer"
WAIT = 600.0  # seconds
MICRO_BATCH, SLOWNESS = 8, 4.0


@dataclass
class Part:
    """One peer's part in a run: when it comes (at which step), whether it is killed (at which step), its speed."""

    name: str
    joins: int = 0
    killed: int = 0
    slowness: float = 1.0
    client_mode: bool = False


def disturbed_parts(steps: int, quick: bool) -> list[Part]:
    """Six peers, or four that have the same faults."""
    plain = [Part("anna")] if quick else [Part("anna"), Part("ben")]
    return [
        *plain,
        Part("cleo", killed=steps // 2),
        Part("dora", joins=max(1, steps // 4)),
        Part("eve", slowness=SLOWNESS, client_mode=quick),
        *([] if quick else [Part("finn", client_mode=True)]),
    ]


def small_run(steps: int, target: int) -> RunConfig:
    """The built-in run with a model of some 100,000 parameters and short rounds."""
    return load_run("emoji").replaced(
        {
            "run.name": "bench-equality",
            "model.dim": 64,
            "model.depth": 2,
            "model.heads": 2,
            "model.dim_head": 32,
            "optimizer.min_8bit_size": 4096,
            "schedule.total_steps": steps,
            "swarm.large_tensor": 4096,
            "swarm.target_batch_size": target,
            "swarm.matchmaking_time": 2.0,
            "swarm.averaging_timeout": 30.0,
            "swarm.next_chunk_timeout": 8.0,
            "swarm.statistics_expiration": 10.0,
        }
    )


@dataclass
class Lived:
    """When a peer's device was there, and the samples it can compute in a second."""

    samples_per_second: float
    began: float
    ended: float = float("inf")

    def samples(self, since: float, until: float) -> float:
        """What its device can compute in a time."""
        return self.samples_per_second * max(0.0, min(self.ended, until) - max(self.began, since))


def states_of(member: LocalPeer) -> list[Step | Synchronised]:
    """Every state that a member has had: made, or taken over."""
    return [*member.of(Step), *member.of(Synchronised)]


def digests_of(members: Iterable[LocalPeer]) -> dict[int, set[str]]:
    """Step → the digests that they held after it: one, if they agree."""
    found: dict[int, set[str]] = {}
    for event in (event for member in members for event in states_of(member)):
        found.setdefault(event.epoch, set()).add(event.digest)
    return found


def need(
    swarm: LocalSwarm, condition: Callable[[], bool], what: str, members: list[LocalPeer], seconds: float = WAIT
) -> None:
    """End with the logs' ends when the swarm does not come so far."""
    if not swarm.wait(condition, seconds):
        tell_logs(members)
        sys.exit(f"not reached within {seconds:.0f} s: {what}")


def tell_logs(members: list[LocalPeer]) -> None:
    """To standard error."""
    for member in members:
        tail = member.worker.log.read_text(errors="replace")[-800:]
        print(f"--- {member.name}: {[event.to_json()[:200] for event in member.events[-3:]]}\n{tail}", file=sys.stderr)


def run_ours(parts: list[Part], steps: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Real peers, with the faults of `parts`. `device_samples_per_step`: see the head of this file."""
    target, last = args.batch * len(parts), {part.name: part for part in parts}
    deaths: dict[str, float] = {}
    with LocalSwarm(small_run(steps, target).to_toml(), folder) as swarm:
        swarm.start_aux()

        def start(part: Part) -> None:
            swarm.start_trainer(
                part.name,
                module="testbed.peer",
                batch_size=MICRO_BATCH,
                seed=list(last).index(part.name),
                client_mode=part.client_mode,
                pace=args.pace * part.slowness,
            )

        def newest() -> int:
            return max((e.epoch for m in swarm.members.values() for e in m.of(Step)), default=0)

        for part in parts:
            if not part.joins:
                start(part)
        trainers = [swarm.members[part.name] for part in parts if not part.joins]
        need(swarm, lambda: all(states_of(m) for m in trainers), "a first step of all", trainers)
        first = newest()
        for part in sorted(parts, key=lambda part: part.joins or part.killed):
            at = max(part.joins, part.killed)
            if not at:
                continue
            need(swarm, partial(lambda at: newest() >= at, at), f"step {at}", trainers)
            if part.joins:
                start(part)
                trainers.append(swarm.members[part.name])
            else:
                victim = swarm.members[part.name]
                os.kill(victim.worker.pid, signal.SIGKILL)
                deaths[part.name] = time.time()
        living = [m for m in trainers if m.name not in deaths]
        need(swarm, partial(all_saved, living, steps), f"step {steps} on all", trainers)
        lived = [
            Lived(MICRO_BATCH / (args.pace * last[m.name].slowness), ready(m), deaths.get(m.name, float("inf")))
            for m in trainers
        ]
        return {
            **step_facts(trainers, lived, first, steps),
            **compare_states(living),
            "rounds_failed": sum(r.outcome == "failed" for m in trainers for r in m.of(Round)),
            "rounds_dropped": sum(r.outcome == "dropped" for m in trainers for r in m.of(Round)),
        }


def all_saved(members: list[LocalPeer], step: int) -> bool:
    """True when the last step's state of all is on the disk."""
    return all(any(event.epoch >= step for event in member.of(Saved)) for member in members)


def ready(member: LocalPeer) -> float:
    """Since when a peer's device could have computed."""
    return next((e.at for e in member.of(Phase) if e.phase == "syncing"), float("inf"))


def step_facts(trainers: list[LocalPeer], lived: list[Lived], first: int, steps: int) -> dict[str, Any]:
    """Digests and times of the steps after `first`."""
    times: dict[int, float] = {}
    for event in (event for member in trainers for event in member.of(Step)):
        times[event.epoch] = min(event.at, times.get(event.epoch, float("inf")))
    unlike = [step for step, found in digests_of(trainers).items() if len(found) > 1]
    missing = [step for step in range(1, steps + 1) if step not in times]
    seconds = times[steps] - times[first]
    samples = sum(life.samples(times[first], times[steps]) for life in lived)
    slowest = max((times[step] - times[step - 1], step) for step in range(first + 1, steps + 1))
    return {
        "steps": steps,
        "digests_compared": sum(len(states_of(member)) for member in trainers),
        "steps_with_unlike_digests": unlike,
        "steps_lost": len(set(missing) | set(unlike)),
        "seconds_per_step": round(seconds / (steps - first), 3),
        "device_samples_per_step": samples / (steps - first),
        "longest_step_s": round(slowest[0], 2),
        "longest_step": slowest[1],
    }


def compare_states(members: list[LocalPeer]) -> dict[str, Any]:
    """Bits that differ between the states that members saved at the end."""
    states = [load(Path(member.of(Saved)[-1].path)) for member in members]
    bits, difference = 0, 0.0
    for other in states[1:]:
        for mine, theirs in ((states[0].parameters, other.parameters), (states[0].optimizer, other.optimizer)):
            for name, tensor in mine.items():
                bits += unlike_bits(tensor, theirs[name])
        for name, tensor in states[0].parameters.items():
            difference = max(difference, float((tensor - other.parameters[name]).abs().max()))
    return {
        "states_compared": len(states),
        "bits_differing": bits,
        "max_parameter_difference": difference,
        "steps_of_states": sorted({state.step for state in states}),
    }


def unlike_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bits of two tensors differ."""
    one, two = (np.frombuffer(tensor.contiguous().numpy().tobytes(), np.uint8) for tensor in (a, b))
    return int(np.unpackbits(one ^ two).sum())


def has_made(peer: Launched, step: int) -> bool:
    """True when this peer has made a step, or a later one."""
    return any(line["epoch"] >= step for line in peer.of("step"))


def run_baseline(parts: list[Part], steps: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """hivemind.Optimizer under the same faults, gradients from seeds: how far peers end from each other."""
    run_file = folder / "run.toml"
    target = args.batch * len(parts)
    run_file.write_text(small_run(steps, target).to_toml())
    given = [
        *("--run", run_file, "--micro-batch", MICRO_BATCH, "--target-batch-size", target, "--steps", steps),
        *("--matchmaking-time", 2.0, "--allreduce-timeout", 30.0, "--averaging-timeout", 60.0),
        *("--next-chunk-timeout", 8.0, "--digests", "--wait-for-gradients"),
    ]
    peers: dict[str, Launched] = {}
    killed: set[str] = set()
    with contextlib.ExitStack() as closing:
        root = closing.enter_context(Launched("root", BASELINE, ["--dht-only"], folder / "root.log"))
        root.wait_for(partial(root.of, "listening"), WAIT, "its address")
        address = root.of("listening")[0]["addresses"][0]

        def start(part: Part) -> None:
            peers[part.name] = closing.enter_context(
                Launched(
                    part.name,
                    BASELINE,
                    [
                        *(*given, "--initial-peer", address, "--seed", len(peers)),
                        *("--micro-batch-seconds", args.pace * part.slowness),
                        *("--parameters", folder / f"{part.name}.npy"),
                        *(["--client-mode"] if part.client_mode else []),
                        *(["--synchronise"] if part.joins else []),
                    ],
                    folder / f"{part.name}.log",
                )
            )

        began = time.time()
        for part in parts:
            if not part.joins:
                start(part)
        watched = peers["anna"]
        for part in sorted(parts, key=lambda part: part.joins or part.killed):
            at = max(part.joins, part.killed)
            if not at:
                continue
            watched.wait_for(partial(has_made, watched, at), args.baseline_limit, f"step {at}")
            if part.joins:
                start(part)
            else:
                os.kill(peers[part.name].pid, signal.SIGKILL)
                killed.add(part.name)
        deadline = time.monotonic() + args.baseline_limit
        living = [peer for name, peer in peers.items() if name not in killed]
        finished: list[Launched] = []
        for peer in living:
            with contextlib.suppress(SystemExit):  # one that does not get there is a result too
                peer.wait_for(partial(peer.of, "done"), max(1.0, deadline - time.monotonic()), "the last step")
                finished.append(peer)
        vectors = [np.load(folder / f"{peer.name}.npy") for peer in finished]
        times = {line["epoch"]: line["at"] for line in reversed(watched.of("step"))}
        digests: dict[int, set[str]] = {}
        for peer in peers.values():
            for line in peer.of("step"):
                digests.setdefault(line["epoch"], set()).add(line["digest"])
        messages = [line["words"] for peer in peers.values() for line in peer.of("message")]
        return {
            "steps": steps,
            "peers_finished": len(finished),
            "peers_living": len(living),
            "max_parameter_difference": max(float(np.abs(a - b).max()) for a, b in combinations(vectors, 2)),
            "largest_parameter": float(max(np.abs(vector).max() for vector in vectors)),
            "steps_with_unlike_digests": sum(len(found) > 1 for found in digests.values()),
            "incomplete_rounds": sum("received" in words for words in messages),
            "seconds_per_step": round((max(times.values()) - min(times.values())) / max(1, len(times) - 1), 2),
            "seconds": round(time.time() - began, 1),
        }

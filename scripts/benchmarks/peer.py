"""Measure what a peer promises the machine that it runs on.

memory    The memory model (tt_cli.memory) against real peers. Pairs of peers train on loopback with set micro-batches,
          step together, leave with a backup; their families of processes are looked at all the while: heaps and shared
          memory by proportional share, mapped files once. On a GPU the GPU's memory too. `memory_model_error` is the
          largest difference between the model and a measured peak, as a part of the peak.
probe     The micro-batch that a peer chooses against all sizes, timed in turns in the same process: `probe_ratio` is
          the chosen one's samples per second over the best one's, of the fastest few timed once more.

Examples:
  scripts/bench peer --only memory --run dalle --sizes 1,2 --memory 7GB
  scripts/bench peer --only probe --threads 1

The paper's run trains on random examples. It needs 16 GiB for a pair; a micro-batch takes a minute on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from testbed.peer import RandomTask

from scripts.benchmarks.harness import progress
from scripts.benchmarks.process_figures import FamilyWatch
from tt_cli.memory import DalleAccount, Need, parse_size
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.peer.device import choose_device
from tt_cli.peer.memory_budget import ACTIVATION_SHARE, PLANNED, RoomMemory, check_room, choose_activation_budget
from tt_cli.peer.micro_batch import SLOWEST_MICRO_BATCH, MicroBatchSearch, undisturbed_seconds
from tt_cli.peer.trainer import MicroStep
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Choice, Event, Failure, Listening, Round
from tt_cli.supervisor.host_memory import family_memory
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

QUICK = "fewer sizes and steps"
WAIT = 3000.0
MICRO_BATCHES = 2  # of each peer for a step
STEPS = 3  # that a pair makes together
SWEEP_ROUNDS, SWEEP_SECONDS = 3, 0.5  # of every size, in turns; at least so long each time
FINAL_ROUNDS = 9  # of the fastest and the chosen one


@dataclass(frozen=True)
class Look:
    """At one peer's processes: bytes in all, and of them in files; free bytes of the GPU."""

    memory: int
    files: int
    gpu_free: int

    @classmethod
    def at(cls, pid: int) -> Look:
        """Now."""
        private, files = family_memory(pid)
        return cls(private + files, files, _gpu_free())


def _gpu_free() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def measure_memory(run: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """All sizes, two at a time; the table's rows, and the largest error."""
    rows: list[dict[str, Any]] = []
    sizes = list(args.sizes)
    for pair in zip(sizes[::2], [*sizes[1::2], sizes[-1]], strict=False):
        rows += measure_pair(run, pair, args)
        progress("memory", rows[-2:])
    worst = max(abs(row["error"]) for row in rows)
    return {"memory_model_error": round(worst, 4), "memory": rows}


def measure_pair(run: RunConfig, sizes: tuple[int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two peers with these micro-batches."""
    run = run.replaced({"swarm.target_batch_size": max(MICRO_BATCHES * sum(sizes), 4 * max(sizes))})
    options: dict[str, Any] = {"threads": args.threads, "memory": args.memory, "device": args.device}
    if run.data.source != "builtin":
        options |= {"module": "testbed.peer", "random": True, "patient": False}
    with (
        tempfile.TemporaryDirectory(prefix="bench-peer-") as scratch,
        LocalSwarm(run.to_toml(), Path(scratch)) as swarm,
    ):
        members = []
        for seed, size in enumerate(sizes):
            name = "ab"[seed]
            member = swarm.start_trainer(name, batch_size=size, seed=seed, **options)
            members.append(member)
            swarm.wait(lambda member=member: bool(member.of(Listening)) or not member.running, WAIT)
            swarm.addresses = swarm.addresses or [a for event in member.of(Listening) for a in event.addresses]
        free = _gpu_free()
        with FamilyWatch({member.name: member.worker.pid for member in members}, Look.at) as watch:
            swarm.wait(lambda: all(_steps(member) >= args.steps or not member.running for member in members), WAIT)
            failures = [event.message for member in members for event in member.of(Failure)]
            swarm.leave("a", "b")
        if failures or not all(_steps(member) >= args.steps for member in members):
            sys.exit(f"the peers did not make {args.steps} steps together: {'; '.join(failures) or 'no time left'}")
        found = [
            _row(run, member, size, watch.looks[member.name], args) for member, size in zip(members, sizes, strict=True)
        ]
        gpu = free - min(look.gpu_free for looks in watch.looks.values() for look in looks)
    if gpu:
        said = sum(row["gpu_predicted"] for row in found)
        for row in found:
            row.update(gpu_measured_of_both=gpu, error=max(row["error"], said / gpu - 1, key=abs))
    return found


def _steps(member: LocalPeer) -> int:
    return sum(event.outcome == "committed" for event in member.of(Round))


def _row(run: RunConfig, member: LocalPeer, size: int, looks: list[Look], args: argparse.Namespace) -> dict[str, Any]:
    choices = {event.what: event.value for event in member.of(Choice)}
    kind = "cuda" if choices["device"].startswith("cuda") else "cpu"
    itemsize = 4 if choices["precision"] == "fp32" else 2
    least = DalleAccount(run).need(kind, itemsize=itemsize)
    rest = int(PLANNED * args.memory) - (least.host if kind == "cpu" else least.device)
    need: Need = DalleAccount(run).need(
        kind, itemsize=itemsize, micro_batch=size, budget=int(ACTIVATION_SHARE[kind] * max(0, rest))
    )
    peak = max(looks, key=lambda look: look.memory)
    return {
        "micro_batch": size,
        "precision": choices["precision"],
        "predicted": need.host,
        "gpu_predicted": need.device,
        "measured": peak.memory,
        "of_it_files": peak.files,
        "looks": len(looks),
        "error": round(need.host / peak.memory - 1, 4),
    }


def measure_probe(run: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """The choice, then every size in turns."""
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    told: list[Event] = []
    task = RandomTask(run)
    device = choose_device(args.device, task, told.append)
    room = check_room(task, device, None, args.memory)
    model = task.new_model()
    model.to(device.torch_device)
    model.activation_budget = choose_activation_budget(task, device, room, told.append)
    memory = RoomMemory(task, device, room, model.activation_budget)
    step = MicroStep(task, model, device, None, None)  # type: ignore[arg-type]
    compute = step.probe(task.examples(0))
    patient = device.kind == "cuda"
    target = run.swarm.target_batch_size
    began = time.perf_counter()
    found = MicroBatchSearch(compute, memory, target, patient=patient).run()
    probed = time.perf_counter() - began
    sizes = [size for size in _all_sizes(max(1, min(256, target // 4))) if memory.predicted(size) <= memory.limit]
    if args.quick:
        sizes = sorted({*sizes[::3], found.size})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(2 if args.quick else SWEEP_ROUNDS):
        for size in sizes:
            seconds[size].append(_seconds(compute, size))
    rates = {size: size / statistics.median(times) for size, times in seconds.items()}
    allowed = {
        size: rate
        for size, rate in rates.items()
        if patient or size / rate <= SLOWEST_MICRO_BATCH or size == found.size
    }
    # the highest of many noisy rates is too high: the fastest and the chosen one are timed again for the ratio
    fastest = sorted(allowed, key=lambda size: -allowed[size])[:3]
    again: dict[int, list[float]] = {size: [] for size in dict.fromkeys([*fastest, found.size])}
    for _ in range(2 if args.quick else FINAL_ROUNDS):
        for size, times in again.items():
            times.append(_seconds(compute, size))
    final = {size: size / statistics.median(times) for size, times in again.items()}
    best = max(final, key=lambda size: final[size])
    return {
        "probe_ratio": round(final[found.size] / final[best], 4),
        "probe": {
            "chosen": found.size,
            "best": best,
            "reason": found.reason,
            "seconds": round(probed, 1),
            "samples_per_second": {size: round(rate, 1) for size, rate in rates.items()},
            "timed_again": {size: round(rate, 1) for size, rate in final.items()},
        },
    }


def _all_sizes(largest: int) -> list[int]:
    """Four between any two powers of two: another one would hardly be faster than its neighbours."""
    sizes = {size for power in range(9) for size in (2**power, 2**power * 5 // 4, 2**power * 3 // 2, 2**power * 7 // 4)}
    return sorted(size for size in sizes if size <= largest)


def _seconds(compute: Any, size: int) -> float:
    """Undisturbed seconds of one micro-batch, the mean of as many as fit in a while."""
    started, count = undisturbed_seconds(), 0
    while not count or undisturbed_seconds() - started < SWEEP_SECONDS:
        compute(size)
        count += 1
    return (undisturbed_seconds() - started) / count


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--only", choices=("memory", "probe"), help="one measurement alone")
    parser.add_argument("--run", default="emoji", help="built-in name or file (default emoji)")
    parser.add_argument("--sizes", help="micro-batches whose memory is measured (default 1,2,4,…,128; quick: 1,16)")
    parser.add_argument("--steps", type=int, help=f"that a pair makes together (default {STEPS}; quick: 1)")
    parser.add_argument("--memory", type=parse_size, default=parse_size("6GB"), help="of each peer (default 6GB)")
    parser.add_argument("--threads", type=int, default=1, help="of each peer (default 1)")
    parser.add_argument("--device", help="as tt join's")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What is asked for."""
    args.steps = args.steps or (1 if args.quick else STEPS)
    args.sizes = [int(size) for size in (args.sizes or ("1,16" if args.quick else "1,2,4,8,16,32,64,128")).split(",")]
    run = load_run(args.run)
    figures: dict[str, Any] = {}
    for name, measured in (("memory", measure_memory), ("probe", measure_probe)):
        if args.only in (None, name):
            figures |= measured(run, args)
    return figures

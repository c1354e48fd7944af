"""Measure what equal state costs and holds: bytes of a global step, and a hundred steps with peers that come and go.

Bytes. Four peers in network namespaces of their own train together, ours (tests/testbed/simulated_peer.py) and after it
stock hivemind.Optimizer as the paper used it (baselines/hivemind_optimizer.py), on the shapes of the paper's
model. The kernel counts the bytes at each peer's link, everything included: gradients, parameters where they are
averaged, matchmaking, the DHT. Counted are whole steps, from the end of the first to that of a later one. --part keeps
that part of the large tensors' rows: they travel in proportion, and what does not shrink (DHT, small tensors) weighs
more. Repeated or incomplete rounds, as on a busy machine, move more or fewer bytes: `incomplete_rounds` should be 0.

Disturbance. Six real training peers on loopback with a small model, one of them slow (a quarter of the speed), one in
client mode, one that joins late, one killed with SIGKILL in the middle. Their micro-batches take a set time, so that
each brings its own samples per second. Compared:

- every member's digest after every step, and at the end every bit of its parameters and optimizer state;
- the steps: each number made, and with one digest;
- `disturbed_time_ratio`: device time spent on a step, over the same without disturbance. Device time counts, for every
  living peer, the samples its device can compute in a second, computing or not: from its first look for the others'
  state to its end. The undisturbed run is six equal peers. 1 means that no time is lost by the disturbance itself.

The same disturbance on stock hivemind.Optimizer: the largest difference of a parameter between two peers.

Examples:
  sudo scripts/bench equality
  scripts/bench equality --quick --json      # what needs root is left out without it
  scripts/bench equality --only disturbance --steps 30
  scripts/bench equality --only baseline --baseline-steps 30

Needs root and iproute2 for the bytes, and 6 GiB of memory (the whole model, --part 1: 20 GiB).
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from testbed.disturbance import Part, disturbed_parts, run_baseline, run_ours
from testbed.launched import Launched
from testbed.namespaces import Network, NoNetwork, need_namespaces

from scripts.benchmarks.harness import progress
from scripts.benchmarks.simulated_peers import MODULES, START_SECONDS, started

QUICK = "fewer peers and steps, a small part of the model"


def has_ended(peer: Launched, step: int) -> bool:
    """True when so many steps are over: hivemind averages parameters after it has "made" one."""
    parameter_rounds = [line for line in peer.of("message") if line["words"].startswith("Averaged parameters")]
    return len(parameter_rounds if peer.of("message") else peer.of("step")) >= step


def measure_bytes(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Bytes that one peer sends and receives in a global step, by the kernel's count."""
    given: list[object] = [
        *("--part", args.part, "--micro-batch", 16, "--micro-batch-seconds", args.seconds),
        *("--target-batch-size", args.target, "--matchmaking-time", args.matchmaking),
    ]
    # gradients awaited as in the paper's code: averaged in the background, many of its rounds stay incomplete
    given += [] if kind == "ours" else ["--wait-for-gradients"]
    with Network(args.peers) as network, started(kind, network.hosts, folder, [given] * args.peers) as peers:
        for peer in peers:
            peer.wait_for(partial(peer.of, "started"), START_SECONDS, "the others' state")
        marks = []
        for step in (1, 1 + args.steps_counted):
            for peer in peers:
                peer.wait_for(partial(has_ended, peer, step), START_SECONDS, f"step {step}")
            marks.append(network.traffic())
        moved = [after.since(before) for before, after in zip(*marks, strict=True)]
        lines = [line for peer in peers for line in peer.lines]
        parameters = peers[0].of("started")[0]["parameters"]
    sent, received = ([getattr(one, way) / args.steps_counted for one in moved] for way in ("sent", "received"))
    mean = (sum(sent) + sum(received)) / len(peers)
    partly = [line for line in lines if line["kind"] == "message" and "received" in line["words"]]
    failed = [line for line in lines if line["kind"] == "round" and line["outcome"] in ("failed", "dropped")]
    return {
        "parameters": parameters,
        "bytes_per_peer_and_step": round(mean),
        "bytes_per_parameter": round(mean / parameters, 3),
        "sent_per_step": [round(value) for value in sent],
        "received_per_step": [round(value) for value in received],
        "steps": args.steps_counted,
        "incomplete_rounds": len(partly) + len(failed),
    }


def measure_both_bytes(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ours and the baseline's, one after the other; a line why not where that cannot be."""
    try:
        need_namespaces()
        found = {f"bytes_{kind}": measure_bytes(kind, args, folder) for kind in MODULES}
    except NoNetwork as error:
        return {"bytes_left_out": str(error)}
    ours, theirs = (found[f"bytes_{kind}"]["bytes_per_peer_and_step"] for kind in MODULES)
    return found | {"bytes_per_step_ratio": round(ours / theirs, 3)}


def measure_disturbance(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ours disturbed and undisturbed."""
    parts = disturbed_parts(args.steps, args.quick)
    disturbed = run_ours(parts, args.steps, args, folder / "disturbed")
    found: dict[str, Any] = {
        "disturbed": disturbed,
        "bits_differing": disturbed["bits_differing"],
        "steps_lost": disturbed["steps_lost"],
    }
    if args.undisturbed_steps:
        equal = [Part(part.name) for part in parts]
        calm = run_ours(equal, args.undisturbed_steps, args, folder / "calm")
        found["undisturbed"] = calm
        ratio = disturbed["device_samples_per_step"] / calm["device_samples_per_step"]
        found["disturbed_time_ratio"] = round(ratio, 3)
    return found


def measure_baseline(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """hivemind.Optimizer disturbed."""
    if not args.baseline_steps:
        return {}
    (folder / "baseline").mkdir()
    parts = disturbed_parts(args.baseline_steps, args.quick)
    theirs = run_baseline(parts, args.baseline_steps, args, folder / "baseline")
    return {"baseline_disturbed": theirs, "baseline_max_parameter_difference": theirs["max_parameter_difference"]}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--only", choices=("bytes", "disturbance", "baseline"), help="one of the measurements")
    parser.add_argument("--part", type=float, help="part of the rows of large tensors (default 0.1; quick: 0.02)")
    parser.add_argument("--steps", type=int, help="steps with disturbance (default 100; quick: 5)")
    parser.add_argument("--baseline-steps", type=int, help="of the baseline (default as --steps; quick: none)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it, or what --only says."""
    quick = args.quick
    args.part = args.part or (0.02 if quick else 0.1)
    args.peers, args.steps_counted = (2, 1) if quick else (4, 3)
    args.seconds, args.target, args.matchmaking = (0.5, 320, 3.0) if quick else (1.0, 1920, 8.0)
    args.steps = args.steps or (5 if quick else 100)
    args.undisturbed_steps = 0 if quick else max(10, args.steps // 2)
    args.baseline_steps = args.baseline_steps or (0 if quick else args.steps)
    args.pace, args.batch, args.baseline_limit = (0.25, 16, 300.0) if quick else (1.0, 24, 1800.0)
    measures = {"bytes": measure_both_bytes, "disturbance": measure_disturbance, "baseline": measure_baseline}
    wanted = [measure for name, measure in measures.items() if args.only in (None, name)]
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-equality-") as scratch,
        ThreadPoolExecutor(len(wanted) if quick else 1) as pool,  # side by side they disturb each other: quick only
    ):
        for result in pool.map(lambda measure: measure(args, Path(scratch)), wanted):
            figures |= result
            progress("equality", result)  # the whole takes half an hour
    return figures

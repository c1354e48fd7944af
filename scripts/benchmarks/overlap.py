"""Measure the share of time in which the devices of four peers are busy, while rounds go on over slow links.

Each peer is a host of its own (a network namespace, tests/testbed/namespaces.py) with a link of so many Mbit/s
each way. They train on the shapes of the paper's model, 125.9 million parameters. The device is simulated by its time:
a micro-batch takes so many seconds, in which the host's cores are free, as beside a GPU; the peers' speeds differ by a
few percent, and a target batch takes all of them together `--compute` seconds. Everything else is real: accumulating,
rounds, 8-bit LAMB on the CPU, digests. Ours with delayed updates (tests/testbed/simulated_peer.py), then stock
hivemind.Optimizer as the paper used it (baselines/hivemind_optimizer.py), one after the other.

`busy_100mbit`: seconds of forward and backward, over the time from the end of the first global step to that of the
last, mean of the peers; `…_min`: of the peer that waited most. Where the rest of the time goes, in seconds per step
and peer:

- accumulating: CPU time of the training thread in `step`. A CPU adds up gradients here; a GPU does it in milliseconds.
  The baseline adds them up in `backward`, which counts as busy;
- waiting: the remainder of `step`, for locks or for a round (the baseline: for the last step's averaging);
- copying: new parameters into the model.

`members_min` (ours) should be 4, `unlike_digests` 0 and `failed_rounds` empty: else another thing was measured.

A device that does not wait computes more than the target while a round takes longer than a target batch:
`samples_over_target` says how much more, and `seconds_per_step` how often parameters change.

--scale keeps that part of the large tensors' rows and of the link's rate, so that rounds take the same time. It is
lowered where memory does not suffice, which is said. --faster divides the compute time and multiplies the link's rate:
the same proportions in less time, and what does not shrink (matchmaking, the DHT) weighs more.

`--only local` measures local steps instead, with messages of 64 in 4,096 numbers, on lines of 20 Mbit/s down and 5 up,
as homes have them: `busy_20_5` where inner steps go on beside a round (`delayed = true`), `waiting_busy_20_5` where
they wait.

Examples:
  sudo scripts/bench overlap
  sudo scripts/bench overlap --only local --steps 4
  sudo scripts/bench overlap --only ours --mbit 20 --steps 5
  sudo scripts/bench overlap --quick --json

Needs root, iproute2, and 12 GiB of memory (baseline: 22 GiB).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testbed.launched import Launched, Line
from testbed.namespaces import Network, need_namespaces
from testbed.shapes import count, model_shapes

from scripts.benchmarks.harness import progress
from scripts.benchmarks.simulated_peers import START_SECONDS, started
from tt_cli.run import load_run

BYTES_PER_PARAMETER, BYTES_PER_PEER = {"ours": 22, "baseline": 42}, 3e8  # of host memory, at the peak
SPEEDS = (0.94, 0.98, 1.02, 1.06)  # of the peers: they need not be in step with each other
MICRO_BATCH, MICRO_BATCHES = 16, 12  # samples; of each peer in a target batch
QUICK = "a small part of the model, twelve times as fast, 1 step"
PATIENCE = 5  # times as long as computing alone would take
STALL_SECONDS = 0.25
UPLOAD, SPARSE = 5, 64  # of a home's line of 20 Mbit/s; numbers of each 4,096 in messages
LOCAL: dict[str, list[object]] = {"local": ["--delayed"], "waiting": []}
MADE = ("committed", "alone")


@dataclass(frozen=True)
class Setting:
    """One measurement. scale: of the model and of the link. faster: by which all is sped up.

    kind: ours, baseline, or of ours local (steps) and waiting: they stop for a round.
    """

    kind: str
    mbit: float
    steps: int
    compute: float
    scale: float
    faster: float

    @property
    def target(self) -> int:
        """Samples of a global step."""
        return MICRO_BATCH * MICRO_BATCHES * len(SPEEDS)

    @property
    def arguments(self) -> list[object]:
        """Of every peer's command line."""
        limit = max(60.0, PATIENCE * self.compute)
        given: list[object] = [
            *("--part", self.scale, "--micro-batch", MICRO_BATCH, "--target-batch-size", self.target),
            *("--matchmaking-time", max(3.0, 15.0 / self.faster), "--averaging-timeout", limit),
            *("--next-chunk-timeout", max(10.0, 30.0 / self.faster)),
        ]
        if self.kind in LOCAL:
            upload = UPLOAD * self.rate / self.mbit
            given += ["--local", "--sparse", SPARSE, "--max-upload", upload, *LOCAL[self.kind]]
        return given + (["--allreduce-timeout", limit] if self.kind == "baseline" else [])

    @property
    def rate(self) -> float:
        """Mbit/s of a link at this scale and pace."""
        return self.mbit * parameters_of(self.scale) / parameters_of(1.0) * self.faster


def parameters_of(scale: float) -> int:
    """How many there are at a scale."""
    return count(model_shapes(load_run("dalle"), scale))


def fitting(kind: str, wanted: float) -> float:
    """The largest scale, `wanted` at most, whose peers fit into the memory that is free now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    room = (0.95 * free / len(SPEEDS) - BYTES_PER_PEER) / BYTES_PER_PARAMETER.get(kind, 30) / parameters_of(1.0)
    if room >= wanted:
        return wanted
    if room < 0.01:
        sys.exit(f"overlap: {free / 2**30:.1f} GiB of free memory are too few for four peers")
    return math.floor(room * 100) / 100


def at_step(peer: Launched, step: int) -> Line | None:
    """Its first line after a micro-batch that found this global step made."""
    return next((line for line in peer.of("loop") if line["epoch"] >= step), None)


def measure_setting(setting: Setting, folder: Path) -> dict[str, Any]:
    """One run of four peers."""
    parameters = parameters_of(setting.scale)
    rate, side = setting.rate, "ours" if setting.kind in LOCAL else setting.kind
    given = [[*setting.arguments, "--micro-batch-seconds", setting.compute / MICRO_BATCHES / speed] for speed in SPEEDS]
    with Network(len(SPEEDS), rate) as network, started(side, network.hosts, folder, given) as peers:
        last, limit = setting.steps + 1, START_SECONDS + (setting.steps + 1) * setting.compute * PATIENCE
        for peer in peers:
            peer.wait_for(partial(at_step, peer, last), limit, f"step {last}")
        return {
            "parameters": parameters,
            "link_mbit": round(rate, 2),
            "scale": setting.scale,
            "faster": setting.faster,
            "compute_seconds": setting.compute,
            **facts(peers, setting),
        }


def facts(peers: Sequence[Launched], setting: Setting) -> dict[str, Any]:
    """What the peers' lines say about the steps after the first."""
    spans = [(peer, at_step(peer, 1), at_step(peer, setting.steps + 1)) for peer in peers]
    busy, per_step, walls, samples, stalls = [], [], [], 0, []
    for peer, first, last in spans:
        assert first is not None and last is not None
        spent = {key: last[key] - first[key] for key in first if key.endswith("seconds")}
        walls.append(spent["seconds"])
        busy.append(spent["busy_seconds"] / spent["seconds"])
        copying = spent.get("copy_seconds", 0.0)
        per_step.append(
            {
                "accumulating": spent["step_cpu_seconds"],
                "waiting": spent["step_seconds"] - spent["step_cpu_seconds"],
                "copying": copying,
                "other": spent["seconds"] - spent["busy_seconds"] - spent["step_seconds"] - copying,
            }
        )
        samples += MICRO_BATCH * (last["micro_batches"] - first["micro_batches"])
        stalls += stalls_of(peer, first["seconds"], last["seconds"])
    rounds = [line for peer, first, last in spans for line in rounds_of(peer, setting.steps)]
    phases = sorted({phase for line in rounds for phase in line["seconds"]})
    messages = [line["words"] for peer in peers for line in peer.of("message")]
    digests = {(line["epoch"], line["digest"]) for peer in peers for line in peer.of("step") if line["digest"]}
    failed = [line["words"] for peer in peers for line in peer.of("round") if line["outcome"] in ("failed", "dropped")]
    return {
        "steps": setting.steps,
        "busy": round(statistics.mean(busy), 4),
        "busy_min": round(min(busy), 4),
        "seconds_per_step": round(statistics.mean(walls) / setting.steps, 2),
        "samples_over_target": round(samples / setting.steps / setting.target, 3),
        "not_busy_seconds_per_step": {
            key: round(statistics.mean(one[key] for one in per_step) / setting.steps, 3) for key in per_step[0]
        },
        "round_seconds": {
            phase: round(statistics.mean(line["seconds"].get(phase, 0.0) for line in rounds), 2) for phase in phases
        },
        "stalls": sorted(stalls, key=lambda stall: -stall["seconds"])[:10],
        "members_min": min((len(line["members"]) for line in rounds), default=None),
        "unlike_digests": len(digests) - len({epoch for epoch, _ in digests}),
        "failed_rounds": failed + [words for words in messages if "received" in words or "failed" in words],
    }


def rounds_of(peer: Launched, steps: int) -> list[Line]:
    """The rounds in which a peer of ours made the steps counted."""
    return [line for line in peer.of("round") if line["outcome"] in MADE and 1 < line["epoch"] <= steps + 1]


def stalls_of(peer: Launched, since: float, until: float) -> list[Line]:
    """Waits of its training thread that were longer than STALL_SECONDS, between two micro-batches."""
    found, lines = [], peer.of("loop")
    for before, line in zip(lines, lines[1:], strict=False):
        in_step = line["step_seconds"] - before["step_seconds"]
        waited = in_step - (line["step_cpu_seconds"] - before["step_cpu_seconds"])
        copied = line.get("copy_seconds", 0.0) - before.get("copy_seconds", 0.0)
        if since < line["seconds"] <= until and waited + copied > STALL_SECONDS:
            at = round(line["seconds"], 1)
            seconds = {"seconds": round(waited + copied, 2), "step": round(waited, 2), "copying": round(copied, 2)}
            found.append({"peer": peer.name, "epoch": line["epoch"], "at": at, **seconds})
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--only", choices=("ours", "baseline", "local"), help="one of them")
    parser.add_argument("--mbit", type=float, nargs="+", help="of each link (default 100 20; quick: 100)")
    parser.add_argument("--steps", type=int, help="global steps counted, after the first (default 10; quick: 1)")
    parser.add_argument("--compute", type=float, default=60.0, help="seconds in which a target batch is computed")
    parser.add_argument("--scale", type=float, help="of the model and the links (default 1; quick: 0.03)")
    parser.add_argument("--faster", type=float, help="than --compute and --mbit say (default 1; quick: 12)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every setting asked for, one after the other."""
    steps, faster = args.steps or (1 if args.quick else 10), args.faster or (12.0 if args.quick else 1.0)
    need_namespaces()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as scratch:
        sides = {"ours": "", "baseline": "baseline_"} if args.only != "local" else {"local": "", "waiting": "waiting_"}
        lines = [20.0] if args.only == "local" else args.mbit or ([100] if args.quick else [100, 20])
        for kind, prefix in sides.items():
            for mbit in lines if args.only in (None, "local", kind) else []:
                scale = fitting(kind, args.scale or (0.03 if args.quick else 1.0))
                setting = Setting(kind, mbit, steps, args.compute / faster, scale, faster)
                result = measure_setting(setting, Path(tempfile.mkdtemp(dir=scratch)))
                line = "20_5" if kind in LOCAL else f"{mbit:g}mbit"
                figures[f"{prefix}busy_{line}"] = result.pop("busy")
                figures[f"{prefix}busy_{line}_min"] = result.pop("busy_min")
                figures[f"{kind}_{line}"] = result
                progress("overlap", figures)
    return figures

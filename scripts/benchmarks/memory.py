"""Measure the host memory that averaging adds to a training loop, per parameter, ours and stock hivemind.Optimizer's.

- Two peers of each kind train together on loopback with a simulated device: tests/testbed/simulated_peer.py and
  baselines/hivemind_optimizer.py. Shapes are the paper's model, 125.9M parameters.
- Memory is the proportional set size of a peer's whole family of processes (Linux, smaps_rollup): pages that several
  processes share are counted once, shared memory is included, also what is open and mapped nowhere. It is looked at
  every second of all global steps, and within some 20 ms when the anonymous memory of the processes reaches a new
  height; the peak counts, of the peer with the larger one.
- A second pair of the same kind with a tiny model runs beside it. The difference of the peaks, over the difference in
  parameters, is what a parameter costs; interpreters, libraries and caches fall out. Of that 8 bytes are the plain
  training loop's own, parameter and gradient: `added_bytes_per_parameter` is the rest.
- local: ours with local steps, one micro-batch to an inner step, and --sparse elements of each 4,096 in its messages. A
  plain loop's own are 16 bytes then, with AdamW's moments, which lie on a GPU where there is one:
  `added_bytes_per_parameter_local` is the rest.
- The account says where the bytes are at the peak, by process: anonymous memory, and memory shared between processes.
  "at rest" is the median of all looks; looks are more frequent while memory grows.
- `hand_over`: afterwards one of the two is ended and a new one takes the state over from the other: the peaks of both.

Examples:
  scripts/bench memory --only ours --part 0.25

Needs 16 GiB of memory for the whole model (--quick: 4 GiB).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testbed.disturbance import has_made
from testbed.launched import Launched

from scripts.benchmarks.harness import progress
from scripts.benchmarks.process_figures import FamilyWatch
from scripts.benchmarks.simulated_peers import START_SECONDS, ready, start
from tt_cli.supervisor.processes import children_of, family_of

QUICK = "a tenth of the model, two steps, no hand-over"
# Bytes per parameter of a plain training loop: fp32 parameter and gradient; with local steps AdamW's moments too.
PLAIN = {"ours": 8, "baseline": 8, "local": 16}
TINY = 0.002
HAND_OVER_SECONDS = 240.0
KEYS = {
    "ours": "added_bytes_per_parameter",
    "baseline": "baseline_added_bytes_per_parameter",
    "local": "added_bytes_per_parameter_local",
}
FORKED = {"ours": ["averager"], "local": ["averager"], "baseline": ["state averager", "gradient averager"]}
Parts = dict[str, dict[str, int]]  # process → kind of memory → bytes


@dataclass
class Sample:
    """One look at a family: Unix time, bytes in all, and by process."""

    at: float
    parts: Parts

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(value for kinds in self.parts.values() for value in kinds.values())


def watch(kind: str, peers: dict[str, Launched]) -> FamilyWatch[Sample]:
    """What these peers take while it is entered."""
    pids = {name: peer.pid for name, peer in peers.items()}
    return FamilyWatch(pids, lambda pid: Sample(time.time(), family_parts(pid, kind)))


def family_parts(pid: int, kind: str) -> Parts:
    """Proportional set size of a peer's processes, by their task."""
    parts: Parts = {}
    daemons = {process for process in family_of(pid) if "p2pd" in Path(f"/proc/{process}/comm").read_text()}
    tasks = list(FORKED[kind])
    for process in sorted(family_of(pid)):
        if process == pid:
            task = "trainer"
        elif process in daemons:
            task = "p2p daemon"
        elif daemons.intersection(children_of(process)):
            task = "DHT"
        elif process in children_of(pid) and tasks:
            task = tasks.pop(0)
        else:
            task = "other"
        found = smaps(process)
        into = parts.setdefault(task, {"anonymous": 0, "shared": 0, "files": 0})
        into["anonymous"] += found["Pss_Anon"]
        into["shared"] += found["Pss_Shmem"]
        into["files"] += found["Pss_File"]
    mapped = sum(kinds["shared"] for kinds in parts.values())
    parts["open files"] = {"anonymous": 0, "shared": max(0, shared_files(pid) - mapped), "files": 0}
    return parts


def shared_files(pid: int) -> int:
    """Bytes of the memory that a family holds as open files (memfd, /dev/shm), mapped or not."""
    found: dict[int, int] = {}
    for process in family_of(pid):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith(("/memfd:", "/dev/shm/")):
                    facts = descriptor.stat()
                    found[facts.st_ino] = 512 * facts.st_blocks
    return sum(found.values())


def smaps(process: int) -> dict[str, int]:
    """Field → bytes of /proc/…/smaps_rollup."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}


def begin(kind: str, name: str, folder: Path, part: float, args: argparse.Namespace, **more: Any) -> Launched:
    """Start one peer of this kind. more: its number, and the peer that it joins, if any."""
    given = [
        *("--part", part, "--micro-batch", 16, "--micro-batch-seconds", args.seconds),
        *("--target-batch-size", args.target, "--matchmaking-time", 5.0),
        *(["--synchronise"] if kind == "baseline" and more["number"] > 2 else []),
        *(["--local", "--sparse", args.sparse] if kind == "local" else []),
    ]
    return start("baseline" if kind == "baseline" else "ours", name, folder, given, more["number"], more.get("first"))


def moment(peer: Launched, at: float) -> str:
    """What a peer was doing at a time, as far as its lines tell."""
    for line in peer.of("round"):
        end = line["at"]
        for phase in ("optimizer", "averaging", "matchmaking"):
            begin = end - line["seconds"].get(phase, 0.0)
            if begin <= at <= end:
                return f"{phase}, step {line['epoch']}"
            end = begin
    told = [line for line in peer.lines if line["kind"] in ("message", "step", "phase", "started") and line["at"] <= at]
    if not told:
        return "starting"
    last = told[-1]
    words = last.get("words") or " ".join(str(last[key]) for key in ("phase", "reason", "epoch") if key in last)
    return f"{at - last['at']:.1f} s after {last['kind']}: {words}"


def measure_kind(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two pairs of peers, the paper's shapes and tiny ones; returns bytes per parameter."""
    sizes = {"large": args.part, "tiny": TINY}
    peers: dict[str, Launched] = {}
    with contextlib.ExitStack() as closing:
        for number in (1, 2):
            for size, part in sizes.items():
                name, first = f"{size}-{number}", peers.get(f"{size}-1")
                peers[name] = begin(kind, name, folder, part, args, number=number, first=first)
                closing.enter_context(peers[name])
        ready(peers.values())
        with watch(kind, peers) as watched:
            for peer in peers.values():
                peer.go()
            for peer in peers.values():
                peer.wait_for(partial(has_made, peer, args.steps), START_SECONDS, f"step {args.steps}")
        counts = {size: peers[f"{size}-1"].of("started")[0]["parameters"] for size in sizes}
        found = summary(kind, peers, watched.looks, counts)
        if args.hand_over:
            progress(kind, found)
            found["hand_over"] = measure_hand_over(kind, args, folder, peers, found, counts)
    return found


def summary(
    kind: str, peers: dict[str, Launched], samples: dict[str, list[Sample]], counts: dict[str, int]
) -> dict[str, Any]:
    """Peaks and medians, as differences between the large and the tiny pair."""
    peak = {name: max(looks, key=lambda sample: sample.total) for name, looks in samples.items()}
    large, tiny = (max((peak[f"{size}-{n}"] for n in (1, 2)), key=lambda s: s.total) for size in ("large", "tiny"))
    name = next(name for name, sample in peak.items() if sample is large)
    rest_large, rest_tiny = (
        statistics.median(sample.total for sample in samples[f"{size}-1"]) for size in ("large", "tiny")
    )
    more = counts["large"] - counts["tiny"]
    account = {
        task: {
            memory: round((value - tiny.parts.get(task, {}).get(memory, 0)) / more, 2)
            for memory, value in kinds.items()
            if memory != "files"
        }
        for task, kinds in large.parts.items()
    }
    return {
        "parameters": counts["large"],
        "peak_bytes": large.total,
        "tiny_peak_bytes": tiny.total,
        "added_bytes_per_parameter": round((large.total - tiny.total) / more - PLAIN[kind], 2),
        "added_at_rest": round((rest_large - rest_tiny) / more - PLAIN[kind], 2),
        "peak_moment": moment(peers[name], large.at),
        "account": account,
        "samples": len(samples[name]),
    }


def measure_hand_over(
    kind: str,
    args: argparse.Namespace,
    folder: Path,
    peers: dict[str, Launched],
    found: dict[str, Any],
    counts: dict[str, int],
) -> dict[str, Any]:
    """A fresh peer takes the state over from the first one: bytes per parameter of both at their peaks."""
    donor = peers["large-1"]
    peers["large-2"].kill()
    with begin(kind, "large-3", folder, args.part, args, number=3, first=donor) as taker:
        ready([taker])
        with watch(kind, {"donor": donor, "taker": taker}) as watched:
            taker.go()
            with contextlib.suppress(SystemExit):
                taker.wait_for(partial(taker.of, "started"), HAND_OVER_SECONDS, "the others' state")
        if not any(line["epoch"] for line in taker.of("started")):
            return {"problem": "the newcomer did not take a state over"}
    tiny, more = found["tiny_peak_bytes"], counts["large"] - counts["tiny"]
    return {
        f"{name}_added_bytes_per_parameter": round((max(s.total for s in looks) - tiny) / more - PLAIN[kind], 2)
        for name, looks in watched.looks.items()
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--part", type=float, help="part of the rows of large tensors to keep (default 1; quick: 0.1)")
    parser.add_argument("--steps", type=int, help="global steps (default 4; quick: 2)")
    parser.add_argument("--only", choices=tuple(KEYS), help="measure one kind alone")
    parser.add_argument("--sparse", type=int, default=0, help="of each 4,096 elements, with local steps; 0: all")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One kind after the other."""
    args.part = args.part or (0.1 if args.quick else 1.0)
    args.steps = args.steps or (2 if args.quick else 4)
    args.seconds, args.target = (0.25, 768) if args.quick else (1.0, 640)
    args.hand_over = not args.quick
    result: dict[str, Any] = {}
    for kind, key in KEYS.items():
        if args.only in (None, kind):
            with tempfile.TemporaryDirectory(prefix="bench-memory-") as scratch:
                result[kind] = measure_kind(kind, args, Path(scratch))
            result[key] = result[kind]["added_bytes_per_parameter"]
    if args.only is None:
        ratio = result["added_bytes_per_parameter"] / result["baseline_added_bytes_per_parameter"]
        result["memory_ratio"] = round(ratio, 3)
    return result

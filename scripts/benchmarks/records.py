"""What the records of 10, 100 and 1,000 peers cost: real signed records on a real DHT of 20 nodes, all on this machine.

An auxiliary peer (its own process, as `tt aux-peer` starts it) and 19 nodes, each of which publishes the records of its
share of the simulated peers, one of each every `every_s` seconds: 15, as trainers do, and for many peers as often as
this machine, which runs all nodes, keeps up with; their records then count for longer, so that all are there. What is
measured in the --seconds after all have been published once:

- `snapshot_s`: an observer, as `tt monitor` is one, reads all records from the DHT, checks each signature, and makes a
  snapshot of them (median); `seen`: the peers in it; `records_kb`: their records, as JSON;
- `aux_cpu`, `aux_rss_mib`: of the auxiliary peer with all its processes: share of a core, memory;
- `loopback_kb_per_s`: of all nodes together, and of whatever else uses this machine's loopback interface meanwhile;
- `store_kb`, `store_cpu_s`: the same for one record that is published: bytes, and CPU seconds of all nodes together;
- `late_s`: the longest that a record waited until it was published; `failed`: records that no node took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import progress
from scripts.benchmarks.process_figures import family_cpu_seconds
from tt_cli.run import load_run
from tt_cli.supervisor.events import Log
from tt_cli.supervisor.host_memory import family_memory
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.swarm.observer import Observer
from tt_cli.swarm.records.snapshot import take_snapshot

NODES, COUNTS = 20, (10, 100, 1000)
QUICK_NODES, QUICK_COUNTS = 4, (10, 50)
QUICK = f"{QUICK_NODES} nodes, {QUICK_COUNTS} peers, short windows"
NODE, AUX = "testbed.record_node", "testbed.record_aux"
START_SECONDS = 600.0  # keys for a thousand peers are made first
EVERY, MOST_PER_SECOND = 15.0, 5.0  # seconds between two records of a peer; records of all of them
LIVES = 2.5  # times as long as that a record counts, at least, so that one may be lost


def loopback_bytes() -> int:
    """That went over this machine's loopback interface since it started."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def told(node: LocalPeer) -> dict[str, float]:
    """The newest word of a node; {} before the first."""
    logs = [event.message for event in node.of(Log) if event.message.startswith("{")]
    return dict(json.loads(logs[-1])) if logs else {}


def measure_row(count: int, nodes: int, every: float, seconds: float) -> dict[str, Any]:
    """One row."""
    run = load_run("emoji")
    lives = max(run.swarm.statistics_expiration, LIVES * every)
    run = run.replaced({"run.name": "bench-records", "swarm.statistics_expiration": lives})
    with (
        tempfile.TemporaryDirectory(prefix="bench-records-") as scratch,
        LocalSwarm(run.to_toml(), Path(scratch)) as swarm,
    ):
        aux = swarm.start_aux(module=AUX)
        parts = [count // (nodes - 1) + (number < count % (nodes - 1)) for number in range(nodes - 1)]
        members = [
            swarm.start(
                f"node-{number}", NODE, {"initial_peers": swarm.addresses, "count": n, "every": every, "seed": number}
            )
            for number, n in enumerate(parts)
        ]
        ready = swarm.wait(
            lambda: all(told(one).get("stored", -1) >= n for one, n in zip(members, parts, strict=True)), START_SECONDS
        )
        if not ready:
            return {"peers": count, "problem": f"not all published within {START_SECONDS:.0f} s", **sums(members)}
        before, cpu, moved, began = (
            sums(members),
            family_cpu_seconds(aux.worker.pid),
            loopback_bytes(),
            time.monotonic(),
        )
        spent = sum(family_cpu_seconds(one.worker.pid) for one in (aux, *members))
        swarm.wait(lambda: False, seconds)
        took, after = time.monotonic() - began, sums(members)
        cpu, moved = family_cpu_seconds(aux.worker.pid) - cpu, loopback_bytes() - moved
        stores = after["stored"] - before["stored"]
        spent = sum(family_cpu_seconds(one.worker.pid) for one in (aux, *members)) - spent
        late = max(
            json.loads(e.message)["late_s"] for m in members for e in m.of(Log)[-int(seconds) :] if e.message[0] == "{"
        )
        times, seen, answer = looks(run, swarm.addresses)
        return {
            "peers": count,
            "nodes": nodes,
            "every_s": every,
            "snapshot_s": round(statistics.median(times), 3),
            "seen": seen,
            "records_kb": round(answer / 1e3, 1),
            "aux_cpu": round(cpu / took, 3),
            "aux_rss_mib": round(sum(family_memory(aux.worker.pid)) / 2**20),
            "stores_per_s": round(stores / took, 1),
            "loopback_kb_per_s": round(moved / took / 1e3, 1),
            "store_kb": round(moved / max(1, stores) / 1e3, 1),
            "store_cpu_s": round(spent / max(1, stores), 3),
            "late_s": late,
            "failed": after["failed"] - before["failed"],
        }


def sums(members: list[LocalPeer]) -> dict[str, int]:
    """Over all nodes."""
    return {key: int(sum(told(one).get(key, 0) for one in members)) for key in ("stored", "failed")}


def looks(run: Any, addresses: list[str]) -> tuple[list[float], int, int]:
    """Seconds of five reads with their snapshots, the peers seen, and the bytes of their records as JSON."""
    times, seen = [], 0
    with Observer(run, addresses) as observer:
        observer.records()  # finds the nodes
        for _ in range(5):
            began = time.monotonic()
            records = observer.records()
            take_snapshot(run, records, None, time.time())
            times.append(time.monotonic() - began)
            seen = max(seen, sum(record.role == "trainer" for record in records))
        size = sum(len(json.dumps(record.model_dump())) for record in records)
    return times, seen, size


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--seconds", type=float, help="of each measurement (default 60; quick: 8)")
    parser.add_argument("--peers", type=int, action="append", help="measure so many (may be given several times)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each number of peers."""
    rows = []
    for count in args.peers or (QUICK_COUNTS if args.quick else COUNTS):
        every = 3.0 if args.quick else max(EVERY, count / MOST_PER_SECOND)
        nodes = QUICK_NODES if args.quick else NODES
        rows.append(measure_row(count, nodes, every, args.seconds or (8.0 if args.quick else 60.0)))
        progress(f"{count} peers", rows[-1])
    return {"rows": rows}

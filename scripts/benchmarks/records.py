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

`--links`: what records and look-ups cost the lines. 12 peers, each a network namespace (root, iproute2) with a real DHT
node and `PeerDirectory`; they publish and look as trainers do, a step every 45 s with a round of 15 s, in which they go
on computing, but no gradients travel. Bytes that each host sent, as its link counts them, over the seconds:

- `between_mbit_mean`, `between_mbit_busiest`: from a step until the next one is due; Mbit/s up of a peer, and of the
  busiest one;
- `in_rounds_mbit_mean`, `in_rounds_mbit_busiest`: from then until all have made the step and told it;
- `idle_mbit_mean`: of nodes that neither publish nor look; it is part of the others;
- `trigger_late_s`: from the moment in which all have computed enough until all know, the longest;
- `told_s`: from a step until all see that all have made it, the longest.

`--simulated`: the same of 12 and 100 peers, or as many as --peers says, on a virtual clock in one process: the real
DHT nodes and `PeerDirectory` of each. Bytes are those of the messages, and for each as many more as libp2p and TCP add.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulation.records import SimulatedPeers
from simulation.virtual import in_virtual_time
from testbed.namespaces import Network
from testbed.record_peer import MICRO_BATCH, Place, WallClock, serve

from scripts.benchmarks.harness import progress
from scripts.benchmarks.process_figures import family_cpu_seconds
from tt_cli.errors import TTError
from tt_cli.run import RunConfig, load_run
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


@dataclass(frozen=True)
class Links:
    """What --links measures. batch: seconds of a micro-batch. step: from one to the next. round: of those, in a round.

    idle: before anybody publishes.
    """

    peers: int = 12
    steps: int = 4
    batch: float = 2.0
    step: float = 45.0
    round: float = 15.0
    idle: float = 15.0


SIMULATED = Links(steps=2)
QUICK_LINKS = Links(peers=4, steps=2, batch=1.0, step=9.0, round=3.0, idle=3.0)
WAIT = 60.0


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


class HostedPeers:
    """Those of --links, each in its host."""

    clock = WallClock()

    def __init__(self, size: Links, run: RunConfig, network: Network, folder: Path):
        self._network, self._pipes = network, list[Any]()
        addresses: list[str] = []
        context = multiprocessing.get_context("fork")
        for number, host in enumerate(network.hosts):
            mine, theirs = context.Pipe()
            home = folder / str(number)
            home.mkdir()
            place = Place(number, host.address, home, run, size.batch, addresses[:1])
            with host.entered():
                context.Process(target=serve, args=(theirs, place)).start()
            theirs.close()
            self._pipes.append(mine)
            addresses.append(self._answer(mine))

    def _answer(self, pipe: Any) -> Any:
        if not pipe.poll(WAIT):
            raise TTError(f"no answer of a peer within {WAIT:.0f} s")
        return pipe.recv()

    def all(self, method: str) -> list[Any]:
        """Have all do the same at once; their answers."""
        for pipe in self._pipes:
            pipe.send(method)
        return [self._answer(pipe) for pipe in self._pipes]

    def sent(self) -> list[int]:
        """By each host, since it began."""
        return [traffic.sent for traffic in self._network.traffic()]

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()


class Cycles:
    """What peers send from step to step. peers: `HostedPeers`, or the simulator's."""

    def __init__(self, size: Links, target: int, peers: Any):
        self.size, self.target, self.peers, self.clock = size, target, peers, peers.clock

    def until(self, method: str, ready: Callable[[list[Any]], bool], most: float = 300.0) -> list[Any]:
        """Ask all again and again; the answers that are as they should be."""
        deadline = self.clock.monotonic() + most
        while not ready(answers := self.peers.all(method)):
            if self.clock.monotonic() > deadline:
                raise TTError(f"{method}: {answers}")
            self.clock.sleep(0.05)
        return answers

    def mark(self) -> tuple[float, list[int]]:
        """The time, and the bytes that each has sent."""
        return self.clock.monotonic(), self.peers.sent()

    def measure(self) -> dict[str, Any]:
        """All of it."""
        self.clock.sleep(min(5.0, self.size.idle))
        idle = self.mark()
        self.clock.sleep(self.size.idle)
        quiet = since(idle, self.mark())[1]
        self.peers.all("begin")
        self.until("sees", lambda seen: min(seen) == self.size.peers)
        cycles = []
        for number in range(1 + self.size.steps):  # the first one has begun late
            cycles.append(self.cycle())
            progress(f"step {number + 1}", {name: cycles[-1][name] for name in ("late", "told")})
        figures: dict[str, Any] = {"peers": self.size.peers}
        figures["idle_mbit_mean"] = round(mbit(statistics.fmean(quiet), self.size.idle), 4)
        for phase in ("between", "in_rounds"):
            seconds = sum(cycle[phase][0] for cycle in cycles[1:])
            each = [sum(counts) for counts in zip(*(cycle[phase][1] for cycle in cycles[1:]), strict=True)]
            figures[f"{phase}_mbit_mean"] = round(mbit(statistics.fmean(each), seconds), 4)
            figures[f"{phase}_mbit_busiest"] = round(mbit(max(each), seconds), 4)
            figures[f"{phase}_s"] = round(seconds, 1)
        for name in ("late", "told"):
            figures[f"{'trigger_' * (name == 'late')}{name}_s"] = round(max(cycle[name] for cycle in cycles[1:]), 2)
        return figures

    def cycle(self) -> dict[str, Any]:
        """From one step to the next: bytes and seconds between the rounds and in one, and what was late."""
        began = self.mark()
        self.until("due", lambda answers: any(since for since, _ in answers))
        due = self.mark()
        answers = self.until("due", lambda answers: all(since for since, _ in answers))
        made = sorted(at for _, batches in answers for at in batches)
        late = max(since for since, _ in answers) - made[-(-self.target // MICRO_BATCH) - 1]
        self.peers.all("round")
        self.clock.sleep(max(0.0, due[0] + self.size.round - self.clock.monotonic()))
        self.peers.all("step")
        stepped = self.clock.monotonic()
        self.until("sees", lambda seen: min(seen) == self.size.peers)
        ended = self.mark()
        return {"between": since(began, due), "in_rounds": since(due, ended), "late": late, "told": ended[0] - stepped}


def since(before: tuple[float, list[int]], after: tuple[float, list[int]]) -> tuple[float, list[int]]:
    """Seconds, and bytes of each."""
    return after[0] - before[0], [now - then for then, now in zip(before[1], after[1], strict=True)]


def run_of(size: Links) -> tuple[RunConfig, int]:
    """The run of so many peers, and its target batch."""
    target = round(size.peers * MICRO_BATCH * size.step / size.batch)
    return load_run("emoji").replaced({"swarm.target_batch_size": target}), target


def measure_links(size: Links) -> dict[str, Any]:
    """What --links measures."""
    run, target = run_of(size)
    with (
        tempfile.TemporaryDirectory(prefix="bench-records-") as scratch,
        Network(hosts=size.peers) as network,
        contextlib.closing(HostedPeers(size, run, network, Path(scratch))) as peers,
    ):
        return Cycles(size, target, peers).measure()


def measure_simulated(size: Links) -> dict[str, Any]:
    """The same in the simulator."""
    logging.disable(logging.WARNING)
    run, target = run_of(size)

    async def work() -> dict[str, Any]:
        peers = SimulatedPeers(run, size.batch)
        await peers.join(size.peers)
        figures = dict[str, Any]()
        driver = peers.clock.thread(lambda: figures.update(Cycles(size, target, peers).measure()), "bench")
        await driver.task
        return figures

    return in_virtual_time(work())


def mbit(count: float, seconds: float) -> float:
    """Mbit/s."""
    return 8 * count / seconds / 1e6


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--seconds", type=float, help="of each measurement (default 60; quick: 8)")
    parser.add_argument("--peers", type=int, action="append", help="measure so many (may be given several times)")
    parser.add_argument("--simulated", action="store_true", help="the same of 12 and 100 (or --peers) in the simulator")
    parser.add_argument("--links", action="store_true", help="what records cost the lines of 12 peers (or --peers)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each number of peers, or what the lines carry."""
    if args.links:
        size = QUICK_LINKS if args.quick else Links()
        return measure_links(replace(size, peers=args.peers[0]) if args.peers else size)
    if args.simulated:
        size = QUICK_LINKS if args.quick else SIMULATED
        return {"rows": [measure_simulated(replace(size, peers=count)) for count in args.peers or (12, 100)]}
    rows = []
    for count in args.peers or (QUICK_COUNTS if args.quick else COUNTS):
        every = 3.0 if args.quick else max(EVERY, count / MOST_PER_SECOND)
        nodes = QUICK_NODES if args.quick else NODES
        rows.append(measure_row(count, nodes, every, args.seconds or (8.0 if args.quick else 60.0)))
        progress(f"{count} peers", rows[-1])
    return {"rows": rows}

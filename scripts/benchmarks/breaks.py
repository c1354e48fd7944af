"""Measure what breaks of one member's line cost a swarm.

Four real peers with a small model, each on a host of its own (network namespaces), and an aux peer beside the first.
The line of one is cut for 6, 15 and 60 s; and all that still comes over the connections which it had is lost, without a
word, while new ones stand as before: its router forgets them, as where it started anew. For each break, in
`rows`, the largest of --turns:

- back_s: from the line's return until all four have made a step together;
- without_step_s: from the break until then, the longest time in which one of the others made no step;
- failed: rounds that failed, of all four.

Needs root, iproute2, nftables and conntrack.

Examples:
  scripts/bench breaks --json
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from testbed.disturbance import need, small_run
from testbed.namespaces import Host, Network

from scripts.benchmarks.harness import progress
from tt_cli.errors import TTError
from tt_cli.supervisor.events import Listening, Round
from tt_cli.supervisor.local_swarm import AUX_MODULE, LocalPeer, LocalSwarm

PEERS, BROKEN = 4, 2  # of these the third
CUTS, QUICK_CUTS = (6.0, 15.0, 60.0), (3.0,)
QUICK = f"one cut, of {QUICK_CUTS[0]:.0f} s, and patience of 8 s for a member instead of a run's 20"
MICRO_BATCH, PACE, TARGET = 4, 0.1, 32
CALM = 20.0  # seconds before each break
RULES = "table inet breaks { chain input { type filter hook input priority 0; ct state invalid drop; }; }"


def arguments(parser: argparse.ArgumentParser) -> None:
    """How often each break is made."""
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="each break so often (default 1)")


def start(network: Network, swarm: LocalSwarm) -> list[LocalPeer]:
    """The peers, when they have made a step together."""
    first = network.hosts[0]
    with first.entered():
        aux = swarm.start("aux", AUX_MODULE, {"port": 0, "initial_peers": [], "host": first.address})
    need(swarm, lambda: bool(aux.of(Listening)), "an aux peer that listens", [aux])
    swarm.addresses = [address for address in aux.of(Listening)[0].addresses if first.address in address]
    members = []
    for seed, host in enumerate(network.hosts):
        options: dict[str, Any] = {"batch_size": MICRO_BATCH, "seed": seed, "pace": PACE, "patient": True}
        with host.entered():
            members.append(swarm.start_trainer(f"peer{seed}", module="testbed.peer", host=host.address, **options))
    need(swarm, lambda: all(map(steps_of_all, members)), "a step of all", members)
    return members


def steps_of(member: LocalPeer, since: float = 0.0) -> list[Round]:
    """Its steps from then on."""
    return [event for event in member.of(Round) if event.outcome == "committed" and event.at >= since]


def steps_of_all(member: LocalPeer, since: float = 0.0) -> list[float]:
    """When it made steps in which all were, from then on."""
    return [event.at for event in steps_of(member, since) if len(event.members) == PEERS]


def watch(hosts: list[Host]) -> None:
    """Have the kernel know all connections, and drop what belongs to none that it knows, from now on."""
    for host in hosts:
        host.run(["nft", RULES])
    time.sleep(5.0)  # something comes over each of them meanwhile
    for host in hosts:
        host.run(["sysctl", "-q", "-w", "net.netfilter.nf_conntrack_tcp_loose=0"])


def forget(address: str, hosts: list[Host]) -> None:
    """Of the connections of this host, at all of them."""
    for host in hosts:
        for way in ("-s", "-d"):
            with contextlib.suppress(TTError):  # none goes that way
                host.run(["conntrack", "-D", way, address])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it; see the head of this file."""
    if missing := [tool for tool in ("nft", "conntrack") if shutil.which(tool) is None]:
        raise TTError(f"{' and '.join(missing)} not found: apt-get install nftables conntrack")
    run, cuts = small_run(10**6, TARGET), QUICK_CUTS
    if not args.quick:
        run, cuts = run.replaced({"swarm.next_chunk_timeout": 20.0, "swarm.statistics_expiration": 30.0}), CUTS
    with (
        tempfile.TemporaryDirectory(prefix="bench-breaks-") as scratch,
        Network(hosts=PEERS) as network,
        LocalSwarm(run.to_toml(), Path(scratch)) as swarm,
    ):
        members, broken = start(network, swarm), network.hosts[BROKEN]
        watch(network.hosts)

        def cut(seconds: float) -> None:
            network.split([broken])
            time.sleep(seconds)
            network.split()

        breaks = {"router forgets": partial(forget, broken.address, network.hosts)}
        breaks |= {f"cut for {seconds:.0f} s": partial(cut, seconds) for seconds in cuts}
        turns = [[row(name, swarm, members, happens) for name, happens in breaks.items()] for _ in range(args.turns)]
        rows = [
            {"break": name, **{key: max(one[key] for one in each) for key in ("back_s", "without_step_s", "failed")}}
            for name, each in zip(breaks, zip(*turns, strict=True), strict=True)
        ]
        return {"rows": rows, "turns": args.turns, "patience_s": run.swarm.next_chunk_timeout}


def row(name: str, swarm: LocalSwarm, members: list[LocalPeer], happens: Callable[[], None]) -> dict[str, Any]:
    """One break, from a calm on until all is well again."""
    swarm.wait(lambda: False, CALM)
    began = time.time()
    happens()
    mended = time.time()
    need(swarm, lambda: all(steps_of_all(one, mended) for one in members), f"a step of all after: {name}", members)
    back = max(steps_of_all(one, mended)[0] for one in members)
    others = [member for number, member in enumerate(members) if number != BROKEN]
    figures = {
        "break": name,
        "back_s": back - mended,
        "without_step_s": max(longest_gap([began, *(e.at for e in steps_of(one, began)), back]) for one in others),
        "failed": sum(event.outcome == "failed" and event.at >= began for one in members for event in one.of(Round)),
    }
    progress(name, figures)
    return figures


def longest_gap(times: list[float]) -> float:
    """Of what came in turn."""
    times = sorted(times)
    return max(later - earlier for earlier, later in pairwise(times))

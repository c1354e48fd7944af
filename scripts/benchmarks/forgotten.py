"""Measure what a swarm loses when a router forgets the connections of one of its members.

Four real peers with a small model, each on a host of its own (network namespaces), and an aux peer beside the first.
From one moment on, all that still comes over the connections which one of them had is lost, without a word, as where a
home's router started anew or has another address; new connections stand as before. Nothing ends, and nobody is told.

- forgotten_without_step_s: the longest time without a step after that, of one of the others;
- forgotten_back_s: until all four make a step together again;
- forgotten_steps_ratio: steps within the --seconds after it, over those in as much time before.

Needs root, iproute2, nftables and conntrack.

Examples:
  scripts/bench forgotten --seconds 90
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.disturbance import need, small_run
from testbed.namespaces import Host, Network

from scripts.benchmarks.harness import progress
from tt_cli.errors import TTError
from tt_cli.supervisor.events import Listening, Round
from tt_cli.supervisor.local_swarm import AUX_MODULE, LocalPeer, LocalSwarm

PEERS, FORGOTTEN = 4, 2  # of these the third
SECONDS, QUICK_SECONDS = 90.0, 12.0
QUICK = f"{QUICK_SECONDS:.0f} s instead of {SECONDS:.0f}, patience of 8 s instead of the run's 20"
MICRO_BATCH, PACE, TARGET = 4, 0.1, 32
RULES = "table inet forgotten { chain input { type filter hook input priority 0; ct state invalid drop; }; }"


def arguments(parser: argparse.ArgumentParser) -> None:
    """How long it is looked at."""
    words = f"before and after (default {SECONDS:.0f}; quick: {QUICK_SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, help=words)


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
        host.run(["conntrack", "-L"])
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
    seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    run = small_run(10**6, TARGET)
    if not args.quick:
        run = run.replaced({"swarm.next_chunk_timeout": 20.0, "swarm.statistics_expiration": 30.0})
    with (
        tempfile.TemporaryDirectory(prefix="bench-forgotten-") as scratch,
        Network(hosts=PEERS) as network,
        LocalSwarm(run.to_toml(), Path(scratch)) as swarm,
    ):
        members = start(network, swarm)
        watch(network.hosts)
        before = time.time()
        swarm.wait(lambda: False, seconds)
        forgotten = time.time()
        forget(network.hosts[FORGOTTEN].address, network.hosts)
        swarm.wait(lambda: False, seconds)
        need(swarm, lambda: all(steps_of_all(one, forgotten + 1) for one in members), "a step of all", members)
        others = [member for number, member in enumerate(members) if number != FORGOTTEN]
        usual = sum(event.at < forgotten for event in steps_of(others[0], before))
        after = [event.at for event in steps_of(others[0], forgotten)]
        progress("forgotten", {"steps before": usual})
        return {
            "forgotten_without_step_s": max(b - a for a, b in zip([forgotten, *after], after, strict=False)),
            "forgotten_back_s": max(steps_of_all(one, forgotten + 1)[0] for one in members) - forgotten,
            "forgotten_steps_ratio": sum(at < forgotten + seconds for at in after) / usual,
            "forgotten_patience_s": run.swarm.next_chunk_timeout,
        }

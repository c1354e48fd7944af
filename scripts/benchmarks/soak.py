"""Let a small swarm live through what volunteers do to it, and see whether a peer that stays stays as it is.

`tt aux-peer` with all its parts and four trainers with a small model (tests/testbed/disturbance.py), each in a network
namespace of its own behind a link of 20 Mbit/s each way. Trainers are SIGKILLed with all their processes by a schedule
that the seed gives, one every few minutes, and started again half a minute later. The first trainer is never killed.
Its family of processes is looked at every few seconds, and that of the auxiliary peer, which takes part in averaging,
records, keeps checkpoints, draws pictures now and then, and whose page is read each time.

- rss_growth: how much more memory (proportional set size, files once) that family takes at the end than after warm-up:
  median of the last fifth of the looks over that of the first fifth, minus 1. Warm-up is a sixth of the time;
- aux_rss_growth, aux_fd_growth: of the auxiliary peer's family;
- fd_growth: the same difference for its open files and processes together, as a number (medians; 0 is flat);
- steps_lost: steps that no survivor made, or after which two peers held unlike states, and steps that the first trainer
  neither made nor took over though others did.

With --stalls all processes of a peer but the first trainer, or one of them, are stopped (SIGSTOP) for up to 25 seconds,
one peer after the other all the time, as by a laptop that sleeps or a machine that swaps.

- left_behind: trainers that do not make a step with the others again, within two minutes after the last stall.

A step is made in three seconds or so. Without root, or without iproute2, the peers share this machine's loopback
without limits, and the output says so.

Examples:
  scripts/bench soak                      # an hour
  scripts/bench soak --minutes 10 --json
  scripts/bench soak --minutes 15 --stalls
  scripts/bench soak --quick              # under a minute: shows that it works, not how memory grows
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.aux_command import AuxCommand
from testbed.disturbance import digests_of, need, small_run, states_of, tell_logs
from testbed.namespaces import Host, Network, NoNetwork, need_namespaces

from tt_cli.supervisor.events import Phase, Round, Step, Trouble
from tt_cli.supervisor.host_memory import family_memory
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.supervisor.processes import family_of

TRAINERS, MBIT = 4, 20.0
MICRO_BATCH, PACE, TARGET = 4, 0.5, 96  # 32 samples a second in all: a step in three seconds
DOWN_SECONDS = 30.0
LOOPBACK = "127.0.0.1"
STALLS = (0.3, 1.0, 2.0, 4.0, 6.0, 10.0, 25.0)  # seconds of one
BACK_SECONDS = 120.0
QUICK = "20 seconds beside the start"
PORT, PAGE = 47310, 47311  # of the auxiliary peer, in its own network namespace
AUX_FLAGS = ("--assist", "--assist-port", "0", "--samples", "--samples-every", "200")


@dataclass
class Plan:
    """How long, how often somebody dies, how often the survivor is looked at; all in seconds. stalls: peers stop."""

    seconds: float
    between: float
    down: float
    look: float
    stalls: bool = False

    @classmethod
    def of(cls, minutes: float, quick: bool, stalls: bool) -> Plan:
        """quick: 20 seconds in all, beside the start."""
        if quick:
            return cls(seconds=20.0, between=8.0, down=2.0, look=0.5, stalls=stalls)
        between = min(180.0, 6 * minutes)
        return cls(seconds=60 * minutes, between=between, down=DOWN_SECONDS, look=5.0, stalls=stalls)


@dataclass(frozen=True)
class Look:
    """A family of processes at one moment: seconds since the beginning, bytes of memory, open files, processes.

    private: bytes of each process that are in no file, by its place in the family and its name; p2pd is the daemon.
    """

    at: float
    memory: int
    files: int
    processes: int
    private: dict[str, int]


@dataclass
class Soak:
    """The swarm while it is watched. lives: every trainer that there was. looks: at the survivor; aux_looks: at aux."""

    swarm: LocalSwarm
    aux: AuxCommand
    hosts: list[Host]
    plan: Plan
    choice: random.Random
    lives: list[LocalPeer] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    aux_looks: list[Look] = field(default_factory=list)
    kills: int = 0
    page_reads: int = 0
    stalls: int = 0
    stalled: threading.Thread | None = None
    left_behind: int = 0

    @property
    def host(self) -> str:
        """Address of the auxiliary peer."""
        return self.hosts[0].address if self.hosts else LOOPBACK

    def start(self, number: int) -> LocalPeer:
        """A trainer, on the host of its number: 0 is the auxiliary peer's."""
        options: dict[str, Any] = {"host": self.hosts[number].address} if self.hosts else {}
        with self.hosts[number].entered() if self.hosts else contextlib.nullcontext():
            member = self.swarm.start_trainer(
                f"peer{number}", module="testbed.peer", batch_size=MICRO_BATCH, seed=number, pace=PACE, **options
            )
        self.lives.append(member)
        return member

    def begin(self) -> LocalPeer:
        """All up and one step made; returns the survivor."""
        self.swarm.addresses = [address for address in self.aux.addresses if f"/{self.host}/" in address]
        trainers = [self.start(number) for number in range(1, TRAINERS + 1)]
        need(self.swarm, lambda: all(states_of(member) for member in trainers), "a first step of all", trainers)
        return trainers[0]

    def run(self, survivor: LocalPeer) -> None:
        """Kill, start again, look, to the end of the plan."""
        began = time.monotonic()
        kill_at, down = began + self.plan.between / 2, dict[int, float]()
        while (now := time.monotonic()) < began + self.plan.seconds and survivor.running:
            self.looks.append(look_at(survivor.worker.pid, now - began))
            self.aux_looks.append(look_at(self.aux.pid, now - began))
            self.read_page()
            if self.plan.stalls and not (self.stalled and self.stalled.is_alive()):
                self.stall()
            if now > kill_at:
                kill_at = now + self.plan.between * self.choice.uniform(0.7, 1.3)
                number = self.choice.choice([n for n in range(2, TRAINERS + 1) if n not in down])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.swarm.members[f"peer{number}"].worker.pid, signal.SIGKILL)
                self.kills += 1
                down[number] = now + self.plan.down
            for number, again in list(down.items()):
                if now > again:
                    del down[number]
                    self.start(number)
            time.sleep(max(0.0, min(self.plan.look, began + self.plan.seconds - time.monotonic())))
        if self.stalled is not None:
            self.stalled.join()
            self.left_behind = self.count_left_behind()
        if not survivor.running:
            tell_logs([survivor])
            sys.exit("the survivor has ended")

    def count_left_behind(self) -> int:
        trainers = [member for member in self.swarm.members.values() if member.running]
        last = max(digests_of(trainers))

        def behind() -> list[LocalPeer]:
            return [member for member in trainers if all(event.epoch <= last for event in member.of(Step))]

        self.swarm.wait(lambda: not behind(), BACK_SECONDS)
        return len(behind())

    def stall(self) -> None:
        """Stop a peer, or one of its processes, for a while; two times in three it is one."""
        _, *others = self.swarm.members.values()
        roots = [self.aux.pid, *(member.worker.pid for member in others if member.running)]
        family = sorted(family_of(self.choice.choice(roots)))
        chosen = [self.choice.choice(family)] if self.choice.random() < 2 / 3 else family
        send(chosen, signal.SIGSTOP)
        self.stalled = threading.Timer(self.choice.choice(STALLS), send, (chosen, signal.SIGCONT))
        self.stalled.start()
        self.stalls += 1

    def read_page(self) -> None:
        """As a visitor of the run's page and Prometheus would."""
        with contextlib.suppress(OSError), self.hosts[0].entered() if self.hosts else contextlib.nullcontext():
            for path in ("api/snapshot", "metrics", "health"):
                urllib.request.urlopen(f"http://{self.host}:{PAGE}/{path}", timeout=5).read()
            self.page_reads += 1

    def facts(self, survivor: LocalPeer, first: int) -> dict[str, Any]:
        """What became of the steps after `first`, and of the survivor."""
        digests = digests_of(self.lives)
        mine = {event.epoch for event in states_of(survivor)}
        last = max(mine)
        passed_over = {step for step in range(first + 1, last + 1) if step not in mine}
        unlike = {step for step, found in digests.items() if len(found) > 1}
        behind = max(0, max(digests) - last - 1)  # the newest one may be under way
        rounds = [event.outcome for event in survivor.of(Round)]
        return {
            **growth(self.looks),
            "steps_lost": len(passed_over | unlike) + behind,
            **{f"aux_{key}": value for key, value in growth(self.aux_looks).items()},
            "minutes": round(self.plan.seconds / 60, 2),
            "kills": self.kills,
            "stalls": self.stalls,
            "left_behind": self.left_behind,
            "page_reads": self.page_reads,
            "steps": last - first,
            "steps_of_survivor": sum(event.epoch > first for event in survivor.of(Step)),
            "rounds_failed": rounds.count("failed"),
            "rounds_dropped": rounds.count("dropped"),
            "troubles": len(survivor.of(Trouble)),
            "starts": sum(event.phase == "starting" for event in survivor.of(Phase)),
            "limited_to_mbit": MBIT if self.hosts else None,
        }


def send(processes: list[int], number: signal.Signals) -> None:
    """A signal to each that has not ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def growth(looks: list[Look]) -> dict[str, Any]:
    """What grew between the first and the last fifth of the looks after warm-up."""
    kept = [look for look in looks if look.at >= looks[-1].at / 6]
    fifth = max(1, len(kept) // 5)
    early, late = kept[:fifth], kept[-fifth:]
    each = {what: [median(part, what) for part in (early, late)] for what in ("memory", "files", "processes")}
    return {
        "rss_growth": round(each["memory"][1] / each["memory"][0] - 1, 4),
        "fd_growth": round(sum(each[what][1] - each[what][0] for what in ("files", "processes")), 1),
        "memory_mb": [round(value / 1e6, 1) for value in each["memory"]],
        "files": each["files"],
        "processes": each["processes"],
        "grown_mb_by_process": {name: round(grown(early, late, name) / 1e6, 1) for name in kept[0].private},
        "memory_mb_by_tenth": by_tenth(looks),
    }


def grown(early: list[Look], late: list[Look], name: str) -> float:
    """Bytes by which one process grew."""
    before, after = (statistics.median(look.private.get(name, 0) for look in part) for part in (early, late))
    return float(after - before)


def look_at(root: int, at: float) -> Look:
    """A process and all below it, now."""
    family = sorted(family_of(root))
    files, private = 0, dict[str, int]()
    for process in family:
        with contextlib.suppress(OSError):
            files += len(os.listdir(f"/proc/{process}/fd"))
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            name = Path(f"/proc/{process}/comm").read_text().strip()
            taken = sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith(("Pss_Anon", "Pss_Shmem")))
            private[f"{len(private)} {name}"] = taken
    return Look(at, sum(family_memory(root)), files, len(family), private)


def median(looks: list[Look], what: str) -> float:
    """Of one number of these looks."""
    return float(statistics.median(getattr(look, what) for look in looks))


def by_tenth(looks: list[Look]) -> list[float]:
    """Medians of the memory, in MB, of each tenth of the time."""
    parts = [looks[len(looks) * n // 10 : len(looks) * (n + 1) // 10] for n in range(10)]
    return [round(median(part, "memory") / 1e6, 1) for part in parts if part]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures; see the head of this file."""
    plan = Plan.of(args.minutes, args.quick, args.stalls)
    run = small_run(100_000, TARGET)
    with contextlib.ExitStack() as closing:
        scratch = closing.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        hosts: list[Host] = []
        with contextlib.suppress(NoNetwork):
            need_namespaces()
            hosts = closing.enter_context(Network(TRAINERS + 1, MBIT)).hosts
        flags = (*AUX_FLAGS, "--port", str(PORT), "--web-port", str(PAGE))
        with hosts[0].entered() if hosts else contextlib.nullcontext():
            host = hosts[0].address if hosts else LOOPBACK
            aux = closing.enter_context(AuxCommand(run, Path(scratch) / "aux", *flags, host=host))
        swarm = closing.enter_context(LocalSwarm(run.to_toml(), Path(scratch) / "trainers"))
        soak = Soak(swarm, aux, hosts, plan, random.Random(args.seed))
        survivor = soak.begin()
        first = max(event.epoch for event in states_of(survivor))
        soak.run(survivor)
        return soak.facts(survivor, first)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="who is killed, and when (default 0)")
    parser.add_argument("--stalls", action="store_true", help="stop peers, or processes of theirs, for a while, too")

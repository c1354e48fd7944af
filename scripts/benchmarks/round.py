"""Measure one averaging round of four peers, each on a host of its own, beside raw TCP and hivemind's own averager.

Every host is a network namespace with a link of so many Mbit/s each way (tests/testbed/namespaces.py: root, iproute2),
and runs real processes: a DHT node with its p2p daemon, and an averager. They average some 32 million fp32 parameters.
In turn, on the same links:

- ours: `tt_cli.swarm.averager.Averager`, the codec of the built-in run, until the average is where the gradient was;
- tcp: plain sockets that carry the same bytes between each pair of hosts, all pairs at once, one stream each way,
  connected and used before they are timed;
- hivemind: its DecentralizedAverager with BLOCKWISE_8BIT for large tensors and fp16 for small ones.

TCP's congestion control is cubic where the machine allows it, else the machine's own; the table says which.
A round's seconds are those of the averaging phase, as the slowest member saw it, from fp32 gradients to their fp32
average; matchmaking is listed by itself. Ours encodes before the exchange and decodes after it, on all peers of this
one machine at once: "exchange_vs_tcp" is without both. Bytes are counted at the links, CPU seconds over all processes
of a peer, matchmaking included.

`--uneven`: three hosts at 100 Mbit/s and one at 10. hivemind is told each line's rate; ours measures it in the first
round, which counts by itself. uneven_over_bound is the median of the later rounds over what no shares can beat: the
time that the slow line needs for its own gradient (`bound`).

`--mixed`: the same for eight lines of 10 and eight of 100 Mbit/s, on the simulator's lines (tests/simulation/lines.py):
mixed_over_bound. Averagers, gradients and what they send are real, time is virtual, and computing takes none of it.
Beside it the three and one of --uneven, simulated_uneven_over_bound. One round begins when the one before it ends, so
that audits and rounds meet. `--large` instead, which takes many minutes: many_over_bound, of 64 lines of 5 to 200
Mbit/s, and listening_300_rounds: of one round of 300 listening members those that all of them commit.

`--groups`: seconds until all of 32, 64, 128 and 256 members with simulated lines of 20 Mbit/s, 50 ms apart, know who is
in their group: `group_s`, and `group_alone_s` where its leader tells all of them all joins. Keys and signatures are
real.

Examples:
  scripts/bench round --mbit 100 --rounds 9
  scripts/bench round --uneven
  scripts/bench round --mixed
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_blockwise
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import BlockwiseQuantization, Float16Compression, SizeAdaptiveCompression
from hivemind.dht import DHT
from simulation.rounds import SignedAverager, ToldByLeaderAverager, group_seconds, rounds_over
from simulation.virtual import in_virtual_time
from testbed.namespaces import Host, Network, Traffic
from testbed.raw_tcp import Exchange

from scripts.benchmarks.process_figures import cpu_seconds
from tt_cli.errors import TTError
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.processes import family_of
from tt_cli.supervisor.reporter import die_with_parent
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundPlan
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition
from tt_cli.swarm.compression.linear8 import implementation
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter, UploadMeter
from tt_cli.swarm.network.dht_node import addresses_of, start_dht
from tt_cli.swarm.network.tcp_counters import acknowledged_bytes

PEERS = 4
# A decoder layer and a half of width 1024 with its embedding: 32 million parameters.
SHAPES = [
    *((8192, 1024), (3072, 1024), (1024, 1024), (8192, 1024), (1024, 4096), (3072, 1024), (1024, 1024), (2624, 1024)),
    *((8192,), (1024,), (1024,), (1024,), (1024,), (1024,), (1024,), (1024,)),
]
QUICK = "two rounds at 100 Mbit/s, without hivemind's averager"
WAIT = 300.0
UNEVEN = (100.0, 100.0, 100.0, 10.0)  # Mbit/s
MIXED = (10.0,) * 8 + (100.0,) * 8
MANY = (5.0, 10.0, 10.0, 20.0, 20.0, 50.0, 100.0, 200.0) * 8
SMALL = {"weight": torch.ones(64, 1024), "bias": torch.ones(64)}  # gradients of members that are many
HOME = 20.0  # Mbit/s of the lines of --groups
LEARNING = 1  # rounds in which ours measures them
NAMES = {"ours": "round", "tcp": "tcp", "hivemind": "hivemind"}  # kind → what its figures begin with
ROUNDS = {100: 5, 20: 3, 1000: 5}  # Mbit/s: rounds of each kind, after the first
Cpu = dict[str, float]


def bench_run() -> RunConfig:
    """The built-in run, with time enough for slow links."""
    return load_run("emoji").replaced({"swarm.averaging_timeout": 280.0, "swarm.matchmaking_time": 10.0})


def shapes(part: int = 1) -> dict[str, torch.Size]:
    """By name, as the averager wants them. part: 1 of so many parts of the parameters."""
    return {f"{index}": torch.Size([first // part, *more]) for index, (first, *more) in enumerate(SHAPES)}


def encoded_bytes(run: RunConfig, part: int = 1) -> int:
    """What all tensors take in the run's codec."""
    codec = codec_of(run)
    return GradientBuffer(Partition(shapes(part), run.swarm.large_tensor, codec.block), codec).nbytes


@dataclass(frozen=True)
class Place:
    """One of `peers` members: its number, its host's address and link, its folder. part: see `shapes`."""

    number: int
    peers: int
    host: str
    mbit: float | None
    folder: Path
    initial_peers: Sequence[str]
    part: int

    def gradients(self) -> list[torch.Tensor]:
        """Its fp32 tensors in shared memory, normal as gradients nearly are."""
        generator = torch.Generator().manual_seed(self.number)
        sizes = shapes(self.part).values()
        return [torch.randn(size, generator=generator).mul_(1e-3).share_memory_() for size in sizes]


@dataclass(frozen=True)
class Outcome:
    """One member's round. seconds: averaging phase. cpu: process → CPU seconds. digest: of the average, if any.

    phases: seconds of what the averaging phase is made of, or of what goes on within it.
    """

    seconds: float
    matchmaking: float
    cpu: Cpu
    digest: str = ""
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def coding(self) -> float:
        """Seconds of it spent before anything was sent and after everything was there."""
        return self.phases.get("encode", 0.0) + self.phases.get("decode", 0.0)


# ---------------------------------------------------------------------------------------------- what runs on the hosts


def cpu_of(named: dict[int, str]) -> Cpu:
    """CPU seconds so far of this process and all under it, by name; p2pd is found by what it is called."""
    spent: Cpu = {}
    for pid in family_of(os.getpid()):
        name = named.get(pid) or Path(f"/proc/{pid}/comm").read_text().strip()
        spent[name] = spent.get(name, 0.0) + cpu_seconds(pid)
    return spent


class OurPeer:
    """A DHT node and tt's averager."""

    def __init__(self, place: Place):
        run, sizes = bench_run(), shapes(place.part)
        implementation()
        me = claim_identity(place.folder, "trainer")
        self.dht = start_dht(run, me, initial_peers=place.initial_peers, host=place.host)
        self.address = addresses_of(self.dht)[0]
        line = BandwidthLimiter(meter=UploadMeter(partial(acknowledged_bytes, self.dht.pid)))
        sharing: dict[str, Any] = {"source": lambda: None, "read_tree": bytes, "line": line}
        self.averager = Averager(run, self.dht, me, sizes, **sharing)
        self.gradients = dict(zip(sizes, place.gradients(), strict=True))
        self.members: list[str] = []

    def connect(self, addresses: Sequence[str]) -> None:
        """Learn who the members are."""
        self.members = [address.rpartition("/")[2] for address in addresses]

    def round(self, number: int, _: int) -> Outcome:
        """Average with the others, from fp32 gradients to their fp32 average."""
        named = {os.getpid(): "peer", self.dht.pid: "dht", self.averager.pid: "averager"}
        before, clock = cpu_of(named), [time.monotonic()]
        for name, gradient in self.gradients.items():
            self.averager.local.encode(name, gradient, 1)
        clock.append(time.monotonic())
        peers = len(self.members)
        control = self.averager.seek(RoundPlan(f"{number}_bench", frozenset(self.members), min(self.members), peers))
        result = self.averager.average(control, Contribution(1, 1.0))
        if not result.complete or len(result.members) != peers or result.repaired or result.failed:
            what = result.problem or f"{result.repaired} parts were mended, and these failed: {result.failed}"
            raise TTError(f"a round of {len(result.members)} members went wrong: {what}")
        clock.append(time.monotonic())
        average = DecodedGradients(self.averager.store.buffer)
        for name in average:
            average[name]
        clock.append(time.monotonic())
        cpu = {name: spent - before.get(name, 0.0) for name, spent in cpu_of(named).items()}
        digest = hashlib.sha256()
        for tensor in average.values():
            digest.update(tensor.numpy().tobytes())
        encode, decode = clock[1] - clock[0], clock[3] - clock[2]
        exchange = result.seconds["transfer"] + result.seconds["commit"]
        return Outcome(
            seconds=encode + exchange + decode,
            matchmaking=clock[2] - clock[1] - exchange,
            cpu=cpu,
            digest=digest.hexdigest(),
            phases={"encode": encode, **result.seconds, "decode": decode},
        )


class TimedAverager(DecentralizedAverager):
    """hivemind's, that says when its averaging phase began."""

    began = multiprocessing.Value("d", 0.0)
    ended = multiprocessing.Value("d", 0.0)

    async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
        self.began.value = time.monotonic()
        gathered = await super()._aggregate_with_group(*args, **kwargs)
        self.ended.value = time.monotonic()
        return gathered


class HivemindPeer:
    """A DHT node and hivemind's averager, both as they come, but for a codec that is loaded before the fork.

    Loaded by several threads of the averager in the first round, it takes seconds, or fails in an import circle.
    """

    def __init__(self, place: Place):
        quantize_blockwise(torch.ones(2**12))
        self._peers = place.peers
        self.dht = DHT(initial_peers=list(place.initial_peers), host_maddrs=[f"/ip4/{place.host}/tcp/0"], start=True)
        self.address = str(self.dht.get_visible_maddrs()[0])
        TimedAverager.began, TimedAverager.ended = multiprocessing.Value("d", 0.0), multiprocessing.Value("d", 0.0)
        self.averager = TimedAverager(
            place.gradients(),
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=place.peers,
            min_group_size=place.peers,
            min_matchmaking_time=10.0,
            request_timeout=8.0,
            allreduce_timeout=280.0,
            next_chunk_timeout=20.0,
            bandwidth=None if place.mbit is None else place.mbit * 1e6,
            compression=SizeAdaptiveCompression(
                2**16, less=Float16Compression(), greater_equal=BlockwiseQuantization()
            ),
        )

    def round(self, _: int, __: int) -> Outcome:
        """Average with the others."""
        named = {os.getpid(): "peer", self.dht.pid: "dht", self.averager.pid: "averager"}
        before, started = cpu_of(named), time.monotonic()
        members = self.averager.step(weight=1.0, timeout=60.0)
        if members is None or len(members) != self._peers:
            raise TTError("hivemind's round failed")
        began, ended = self.averager.began.value, self.averager.ended.value
        cpu = {name: spent - before.get(name, 0.0) for name, spent in cpu_of(named).items()}
        return Outcome(ended - began, began - started, cpu)


class TcpPeer:
    """Plain sockets."""

    def __init__(self, place: Place):
        self.exchange = Exchange(place.host)
        self.address, self.connect = self.exchange.address, self.exchange.connect

    def round(self, _: int, pair_bytes: int) -> Outcome:
        """Send `pair_bytes` to each other host and receive as many from it."""
        named = {os.getpid(): "tcp"}
        before = cpu_of(named)
        seconds = self.exchange.run(pair_bytes)
        return Outcome(seconds, 0.0, {name: spent - before.get(name, 0.0) for name, spent in cpu_of(named).items()})


MAKE: dict[str, Callable[..., Any]] = {"ours": OurPeer, "tcp": TcpPeer, "hivemind": HivemindPeer}


def serve(kind: str, connection: Any, place: Place) -> None:
    """In a host: start one peer, then do what the bench says until it is gone."""
    die_with_parent()
    torch.set_num_threads(1)
    if not os.environ.get("TT_BENCH_LOG"):
        logging.disable(logging.WARNING)
    try:
        peer = MAKE[kind](place)
        connection.send(peer.address)
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(peer, method)(*arguments))
    except EOFError:
        pass
    except Exception as error:  # whatever it was: the bench says it and ends
        connection.send(error if isinstance(error, TTError) else TTError(f"{type(error).__name__}: {error}"))
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------ the bench


class Group:
    """The peers of one kind, one on each host. mbit: of each link, for hivemind's. part: see `shapes`."""

    def __init__(self, kind: str, hosts: Sequence[Host], folder: Path, mbit: Sequence[float] = (), part: int = 1):
        self.kind, self.connections = kind, []
        addresses: list[str] = []
        context = multiprocessing.get_context("fork")
        for number, host in enumerate(hosts):
            mine, theirs = context.Pipe()
            home = folder / f"{kind}-{number}"
            home.mkdir()
            rate = mbit[number] if mbit else None
            place = Place(number, len(hosts), host.address, rate, home, addresses[:1], part)
            with host.entered():
                context.Process(target=serve, args=(kind, theirs, place), daemon=False).start()
            theirs.close()
            self.connections.append(mine)
            if number == 0:
                addresses.append(self._answer(mine))
        addresses += [self._answer(one) for one in self.connections[1:]]
        if kind != "hivemind":
            self.all("connect", addresses)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Have all peers do the same at once; their answers."""
        for connection in self.connections:
            connection.send((method, arguments))
        return [self._answer(connection) for connection in self.connections]

    def _answer(self, connection: Any) -> Any:
        if not connection.poll(WAIT):
            raise TTError(f"{self.kind}: no answer within {WAIT:.0f} s")
        answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass(frozen=True)
class Measured:
    """One round of one kind. seconds: the slowest member's. sent: bytes of all members. cpu, phases: their means.

    exchange: seconds of the slowest member without encoding and decoding, where these are phases of their own.
    """

    seconds: float
    exchange: float
    matchmaking: float
    sent: int
    cpu: Cpu
    phases: dict[str, float]


def measure_round(group: Group, network: Network, number: int, pair_bytes: int) -> Measured:
    """One round of all peers of a group."""
    before = network.traffic()
    outcomes: list[Outcome] = group.all("round", number, pair_bytes)
    moved: list[Traffic] = [now.since(then) for now, then in zip(network.traffic(), before, strict=True)]
    if len({outcome.digest for outcome in outcomes}) != 1:
        raise TTError("the members ended with unlike averages")
    return Measured(
        seconds=max(outcome.seconds for outcome in outcomes),
        exchange=max(outcome.seconds - outcome.coding for outcome in outcomes),
        matchmaking=max(outcome.matchmaking for outcome in outcomes),
        sent=sum(one.sent for one in moved),
        cpu=means([outcome.cpu for outcome in outcomes]),
        phases=means([outcome.phases for outcome in outcomes]),
    )


def means(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure; who lacks one counts with 0."""
    names = sorted({name for each in measured for name in each})
    return {name: round(statistics.fmean(each.get(name, 0.0) for each in measured), 3) for name in names}


def median(values: Iterable[float], digits: int = 3) -> float:
    return round(statistics.median(values), digits)


def summary(rounds: dict[str, list[Measured]], mbit: int, ideal: float) -> dict[str, Any]:
    """The figures of one rate. ideal: bytes that all members must send, whatever the way."""
    found: dict[str, Any] = {}
    for kind in (kind for kind in NAMES if kind in rounds):
        name, measured = NAMES[kind], rounds[kind]
        found[f"{name}_s_{mbit}mbit"] = median(one.seconds for one in measured)
        found[f"{name}_each_s_{mbit}mbit"] = [round(one.seconds, 3) for one in measured]
        found[f"{name}_matchmaking_s_{mbit}mbit"] = median(one.matchmaking for one in measured)
        found[f"{name}_wire_ratio_{mbit}mbit"] = median([one.sent / ideal for one in measured], 4)
        found[f"{name}_cpu_s_{mbit}mbit"] = median(sum(one.cpu.values()) for one in measured)
        found[f"{name}_cpu_by_process_s_{mbit}mbit"] = means([one.cpu for one in measured])
        if kind == "ours":
            found[f"{name}_phases_s_{mbit}mbit"] = means([one.phases for one in measured])
        if kind != "tcp" and (pairs := list(zip(rounds.get("tcp", ()), measured, strict=False))):
            found[f"{name}_vs_tcp_{mbit}mbit"] = median(tcp.seconds / one.seconds for tcp, one in pairs)
            found[f"{name}_exchange_vs_tcp_{mbit}mbit"] = median(tcp.seconds / one.exchange for tcp, one in pairs)
    return found


def of_the_first(first: dict[str, Measured], later: dict[str, list[Measured]]) -> dict[str, Any]:
    """The first round beside the median of the later ones, without and with matchmaking."""
    found = {}
    for kind in (kind for kind in first if kind != "tcp"):
        usual = statistics.median(one.seconds for one in later[kind])
        usual_whole = statistics.median(one.seconds + one.matchmaking for one in later[kind])
        found[f"{NAMES[kind]}_first_s"] = round(first[kind].seconds, 3)
        found[f"{NAMES[kind]}_first_ratio"] = round(first[kind].seconds / usual, 3)
        whole = first[kind].seconds + first[kind].matchmaking
        found[f"{NAMES[kind]}_first_with_matchmaking_ratio"] = round(whole / usual_whole, 3)
    return found


def congestion_control() -> str | None:
    """Linux's usual one, if hosts may choose it. With bbr, streams that meet in one queue use four fifths of a link."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else None


def bench(rates: dict[int, int], kinds: Sequence[str], folder: Path) -> dict[str, Any]:
    """rates: Mbit/s → rounds of each kind, the first rate also for the first round."""
    encoded = encoded_bytes(bench_run())
    pair_bytes = round(2 * encoded / PEERS)
    ideal = 2 * (PEERS - 1) * encoded  # (n - 1)/n of the tensors to the reducers and back, for each of n members
    found: dict[str, Any] = {"parameters": sum(torch.Size(shape).numel() for shape in SHAPES), "encoded_bytes": encoded}
    with Network(hosts=PEERS, mbit=next(iter(rates)), congestion=congestion_control()) as network:
        found["congestion_control"] = network.hosts[0].run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]).strip()
        groups = {kind: Group(kind, network.hosts, folder) for kind in kinds}
        number = 0
        first: dict[str, Measured] = {}
        for kind, group in groups.items():
            first[kind] = measure_round(group, network, number, pair_bytes)  # tcp: warms its connections up
        for mbit, rounds in rates.items():
            network.limit(mbit)
            measured: dict[str, list[Measured]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                number += 1
                for kind, group in groups.items():
                    measured[kind].append(measure_round(group, network, number, pair_bytes))
            found |= summary(measured, mbit, ideal)
            if mbit == next(iter(rates)):
                found |= of_the_first(first, measured)
                for kind in (kind for kind in kinds if kind != "tcp"):
                    found |= {
                        f"{NAMES[kind]}_{what}": found[f"{NAMES[kind]}_{what}_{mbit}mbit"]
                        for what in ("wire_ratio", "cpu_s")
                    }
    return found


def bound(mbit: Sequence[float], part: int = 1) -> float:
    """Seconds below which no shares bring a round over these lines, in the codec's bytes. part: see `shapes`.

    In t seconds a line of b gradients a second reduces the share (b t - 1) / (n - 2) at most, for it carries its own
    gradient and n - 2 times its share beside: the shortest t in which each carries its own, and all reduce everything.
    """
    encoded = 8 * encoded_bytes(bench_run(), part) / 1e6
    low, high = encoded / min(mbit), encoded * len(mbit) / min(mbit)
    if sum(low * rate / encoded - 1 for rate in mbit) >= len(mbit) - 2:
        return low
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        enough = sum(middle * rate / encoded - 1 for rate in mbit) >= len(mbit) - 2
        low, high = (low, middle) if enough else (middle, high)
    return high


def over_bound(name: str, seconds: Sequence[float], bound_s: float) -> dict[str, Any]:
    """The first round by itself, and the median of the later ones."""
    return {
        f"{name}_each_s": [round(one, 2) for one in seconds],
        f"{name}_first_over_bound": round(seconds[0] / bound_s, 3),
        f"{name}_over_bound": median(one / bound_s for one in seconds[LEARNING:]),
    }


def simulated(rounds: int, lines: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Rounds over simulated lines. lines: name → Mbit/s of each."""
    generator, found = torch.Generator().manual_seed(0), dict[str, Any]()
    gradients = {name: torch.randn(size, generator=generator).mul_(1e-3) for name, size in shapes().items()}
    for name, mbit in lines.items():
        made = in_virtual_time(rounds_over(mbit, gradients, LEARNING + rounds))
        if words := [problem for one in made for problem in one.problems]:
            raise TTError(f"{name}: a round went wrong: {words[0]}")
        found |= {f"{name}_bound_s": round(bound(mbit), 2)} | over_bound(
            name, [one.seconds for one in made], bound(mbit)
        )
    return found


def groups(members: int) -> dict[str, Any]:
    """Seconds until a group of so many has formed for all of them."""
    logging.disable(logging.WARNING)
    kinds = {"group_alone_s": ToldByLeaderAverager, "group_s": SignedAverager}
    made = {name: in_virtual_time(group_seconds([HOME] * members, kind)) for name, kind in kinds.items()}
    return {"members": members, **{name: round(seconds, 2) for name, seconds in made.items()}}


def uneven(part: int, rounds: int, kinds: Iterable[str], folder: Path) -> dict[str, Any]:
    """Rounds over unlike lines. part: see `shapes`."""
    bound_s = bound(UNEVEN, part)
    found: dict[str, Any] = {"uneven_mbit": UNEVEN, "uneven_bound_s": round(bound_s, 2)}
    with Network(hosts=len(UNEVEN), congestion=congestion_control()) as network:
        for host, mbit in zip(network.hosts, UNEVEN, strict=True):
            network.limit(mbit, host)
        groups = {kind: Group(kind, network.hosts, folder, UNEVEN, part) for kind in kinds}
        measured: dict[str, list[float]] = {kind: [] for kind in groups}
        for number in range(LEARNING + rounds):
            for kind, group in groups.items():
                measured[kind].append(measure_round(group, network, number, 0).seconds)
    for kind, seconds in measured.items():
        found |= over_bound("uneven" if kind == "ours" else f"{kind}_uneven", seconds, bound_s)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument(
        "--mbit", type=int, nargs="+", metavar="N", help="links of these rates instead of 100, 20, 1000"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each kind at each rate, after the first one")
    parser.add_argument("--uneven", action="store_true", help="three links of 100 Mbit/s and one of 10")
    parser.add_argument("--mixed", action="store_true", help="eight lines of 10 Mbit/s and eight of 100, simulated")
    parser.add_argument("--large", action="store_true", help="with --mixed: 64 unlike lines, and 300 members")
    parser.add_argument("--groups", action="store_true", help="how long groups of 32 to 256 take to form, simulated")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="leave the others out")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rates, all kinds."""
    rates = {100: 2} if args.quick else {mbit: ROUNDS.get(mbit, 3) for mbit in args.mbit or ROUNDS}
    if args.rounds:
        rates = dict.fromkeys(rates, args.rounds)
    if args.groups:
        return {"groups": [groups(members) for members in ((24, 48) if args.quick else (32, 64, 128, 256))]}
    if args.mixed:
        lines = {"many": MANY} if args.large else {"mixed": MIXED, "simulated_uneven": UNEVEN}
        found = simulated(args.rounds or (1 if args.quick else 4), lines)
        if args.large:
            made = in_virtual_time(rounds_over([100.0] * 300, SMALL, 1))
            found["listening_300_rounds"] = sum(not one.problems for one in made)
        return found
    with tempfile.TemporaryDirectory(prefix="bench-round-") as scratch:
        if args.uneven:
            rounds, part = args.rounds or (1 if args.quick else 4), 8 if args.quick else 1
            kinds = [kind for kind in args.only or ("ours", "hivemind")[: 1 if args.quick else 2] if kind != "tcp"]
            return uneven(part, rounds, kinds, Path(scratch))
        return bench(rates, args.only or [*NAMES][: 2 if args.quick else None], Path(scratch))

"""Rounds of averagers alone over limited lines, one after the other, so that their meters learn: no trainer, no faults.

What they run is the product's from the join to the commit; see schedule.py for what stands in.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from simulation.averager import SimulatedAverager
from simulation.lines import MBIT, Lines, Rate
from simulation.machine import identity_of, measured_line, run_of
from simulation.network import USUAL, Dht, Line, Network, Node
from simulation.state import read_tree
from simulation.virtual import Process, VirtualClock

from tt_cli.run import RunConfig
from tt_cli.swarm.allreduce.messages import Signer, open_envelope
from tt_cli.swarm.allreduce.rendezvous import LeaderRendezvous
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundPlan
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.rsa_identity import peer_id_of


@dataclass(frozen=True)
class LinedRound:
    """One round. seconds: of transfer and commit, the slowest member's; commit: of that alone, the longest.

    uploads: Mbit/s that each said it carries.
    """

    seconds: float
    commit: float
    uploads: tuple[float, ...]
    problems: tuple[str, ...]


class SignedAverager(SimulatedAverager):
    """Signs with the key of its identity: its messages are as large as real ones."""

    def __init__(self, run: RunConfig, dht: Any, identity: Any, shapes: Any, **more: Any):
        super().__init__(run, dht, identity, shapes, **more)
        self.signer, self.audits.rules = Signer(identity.key), replace(self.audits.rules, opened=open_envelope)


class ToldByLeader(LeaderRendezvous):
    """As leader it tells all members all joins."""

    relays = MAX_MEMBERS


class ToldByLeaderAverager(SignedAverager):
    """One whose leader tells all."""

    rendezvous_type = ToldByLeader


@functools.lru_cache(512)
def real_identity(number: int) -> Any:
    """One with a key of RSA."""
    key = RSAPrivateKey()
    return SimpleNamespace(key=key, peer_id=peer_id_of(key.get_public_key().to_bytes()), path=Path(f"{number}.key"))


class LinedPeer:
    """One machine with the real averager. gradients: name → tensor, the same for all."""

    def __init__(
        self,
        network: Network,
        number: int,
        run: RunConfig,
        gradients: Mapping[str, torch.Tensor],
        kind: type[SimulatedAverager] = SimulatedAverager,
    ):
        identity = real_identity(number) if issubclass(kind, SignedAverager) else identity_of(number)
        self.process = Process([])
        self.name, limiter, clock = identity.peer_id, measured_line(network, number), VirtualClock()
        node = Node(network, number, PeerID.from_base58(self.name), self.process, limiter)
        dht: Any = Dht(node, Admission(run), client_mode=False)
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        sharing: dict[str, Any] = {"source": lambda: None, "read_tree": read_tree, "line": limiter, "clock": clock}
        self.averager, self._clock = kind(run, dht, identity, shapes, **sharing), clock
        for name, gradient in gradients.items():
            self.averager.local.encode(name, gradient, 1)

    async def round(self, plan: RoundPlan) -> RoundResult:
        """Average with the others."""
        result = RoundResult()

        def average() -> None:
            nonlocal result
            result = self.averager.average(self.averager.seek(plan), Contribution(1, 1.0))

        async def run() -> None:
            await self._clock.thread(average, "round").task

        await self.process.run(run())
        return result


async def rounds_over(
    mbit: Sequence[float], gradients: Mapping[str, torch.Tensor], rounds: int, line: Line = USUAL
) -> list[LinedRound]:
    """So many rounds of members with these lines each way, all with these gradients. line: what delays messages."""
    times = {"averaging_timeout": 280.0, "matchmaking_time": 10.0, "next_chunk_timeout": 20.0}
    run = run_of(len(mbit), "mean").replaced({f"swarm.{name}": seconds for name, seconds in times.items()})
    lines = Lines({number: Rate(rate * MBIT, rate * MBIT) for number, rate in enumerate(mbit)})
    network = Network(random.Random(0), line, (), {}, lines)
    peers = [LinedPeer(network, number, run, gradients) for number in range(len(mbit))]
    names, made = frozenset(peer.name for peer in peers), list[LinedRound]()
    for number in range(rounds):
        uploads = tuple(peer.averager.upload / 1e3 for peer in peers)
        plan = RoundPlan(f"{number}_00", names, min(names), len(names))
        results = await asyncio.gather(*(peer.round(plan) for peer in peers))
        took = [[result.seconds.get(phase, 0.0) for phase in ("transfer", "commit")] for result in results]
        seconds, commit = max(map(sum, took)), max(one[1] for one in took)
        made.append(LinedRound(seconds, commit, uploads, tuple(filter(None, (result.problem for result in results)))))
    for peer in peers:
        peer.process.kill()
    return made


async def group_seconds(mbit: Sequence[float], kind: type[SimulatedAverager], matchmaking: float = 120.0) -> float:
    """Seconds until a group of members with these lines has formed for all of them. matchmaking: that it may take."""
    times = {"averaging_timeout": 280.0, "matchmaking_time": matchmaking, "next_chunk_timeout": 20.0}
    run = run_of(len(mbit), "mean").replaced({f"swarm.{name}": seconds for name, seconds in times.items()})
    lines = Lines({number: Rate(rate * MBIT, rate * MBIT) for number, rate in enumerate(mbit)})
    network = Network(random.Random(0), Line(delay=0.05, steady=True), (), {}, lines)
    peers = [LinedPeer(network, number, run, {"weight": torch.ones(256)}, kind) for number in range(len(mbit))]
    plan = RoundPlan("0_00", frozenset(peer.name for peer in peers), peers[0].name, len(peers))
    began = asyncio.get_running_loop().time()
    rounds = [asyncio.create_task(peer.round(plan)) for peer in peers]
    async with asyncio.timeout(2 * matchmaking):
        while not all(peer.averager.began_at for peer in peers):
            await asyncio.sleep(0.05)
    for peer, made in zip(peers, rounds, strict=True):
        peer.process.kill()
        made.cancel()
    return max(peer.averager.began_at for peer in peers) - began

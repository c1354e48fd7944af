"""Rounds of averagers alone over limited lines, one after the other, so that their meters learn: no trainer, no faults.

What they run is the product's from the join to the commit; see schedule.py for what stands in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.p2p import PeerID
from simulation.averager import SimulatedAverager
from simulation.lines import MBIT, Lines, Rate
from simulation.machine import identity_of, measured_line, run_of
from simulation.network import USUAL, Dht, Line, Network, Node
from simulation.state import read_tree
from simulation.virtual import Process, VirtualClock

from tt_cli.run import RunConfig
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundPlan
from tt_cli.swarm.membership.admission import Admission


@dataclass(frozen=True)
class LinedRound:
    """One round. seconds: of transfer and commit, the slowest member's; commit: of that alone, the longest.

    uploads: Mbit/s that each said it carries.
    """

    seconds: float
    commit: float
    uploads: tuple[float, ...]
    problems: tuple[str, ...]


class LinedPeer:
    """One machine with the real averager. gradients: name → tensor, the same for all."""

    def __init__(self, network: Network, number: int, run: RunConfig, gradients: Mapping[str, torch.Tensor]):
        self.process, identity = Process([]), identity_of(number)
        self.name, limiter, clock = identity.peer_id, measured_line(network, number), VirtualClock()
        node = Node(network, number, PeerID.from_base58(self.name), self.process, limiter)
        dht: Any = Dht(node, Admission(run), client_mode=False)
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        sharing: dict[str, Any] = {"source": lambda: None, "read_tree": read_tree, "line": limiter, "clock": clock}
        self.averager, self._clock = SimulatedAverager(run, dht, identity, shapes, **sharing), clock
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
        seconds = max(result.seconds["transfer"] + result.seconds["commit"] for result in results)
        commit = max(result.seconds["commit"] for result in results)
        made.append(LinedRound(seconds, commit, uploads, tuple(filter(None, (result.problem for result in results)))))
    for peer in peers:
        peer.process.kill()
    return made

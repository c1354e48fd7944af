"""Rounds of 64 members on a virtual clock, some of whom die in them: `scripts/bench deaths` says what is measured."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from typing import AsyncIterator as Stream  # noqa: UP035 - hivemind looks at the name of the annotation

import torch
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import achain, as_aiter
from simulation.averager import HashSigner
from simulation.machine import key_of
from simulation.network import Line, Network, Node
from simulation.virtual import Process, in_virtual_time

from tt_cli.run import load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import GROUP_BYTES, RoundName
from tt_cli.swarm.allreduce.part_fetch import answer
from tt_cli.swarm.allreduce.round_plan import RoundGroup
from tt_cli.swarm.allreduce.votes import group_of
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer, Partition

MEMBERS, PARTS = 64, 4  # of a round; of each reducer
ROUND, LIFE = 107.0, 7200.0  # seconds
PATIENCE, LONGEST = 60.0, 300.0
PART_SECONDS = ROUND / (2 * PARTS * (MEMBERS - 1))
CODEC = codec_of(load_run("emoji").replaced({"swarm.large_tensor": 1}))
NAME = RoundName("deaths-12345678", "0_00", hashlib.sha256(b"group").digest())


class FineCut(Partition):
    """Parts of one block."""

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield from ((first, first + self.block) for first in range(start, stop, self.block))


LAYOUT = FineCut({"weight": torch.Size([MEMBERS * PARTS * CODEC.block])}, 1, CODEC.block)


class PacedLine:
    """A line on which one part after the other travels, each way."""

    def __init__(self) -> None:
        self._free = {"up": 0.0, "down": 0.0}

    async def carry(self, way: str) -> None:
        now = loop_time()
        self._free[way] = max(now, self._free[way]) + PART_SECONDS
        await asyncio.sleep(self._free[way] - now)

    async def carried(self, way: str, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            await self.carry(way)
            yield message


class PacedAllReduce(AllReduce):
    """Sends and takes parts at the pace of its line."""

    line: PacedLine

    def repeated(self, *args: Any) -> AllReduce:
        again = super().repeated(*args)
        again.line = self.line  # type: ignore[attr-defined]
        return again

    def _outgoing(self, indexes: Sequence[int]) -> AsyncIterator[averaging_pb2.AveragingData]:
        return self.line.carried("up", super()._outgoing(indexes))

    def rpc_aggregate_part(self, stream: Any, context: P2PContext) -> AsyncIterator[averaging_pb2.AveragingData]:
        taken = self.line.carried("down", stream)
        return self.line.carried("up", super().rpc_aggregate_part(taken, context))


class WithoutBackups(CommitProtocol):
    """What a dead reducer leaves is lost."""

    def _lost(self) -> list[int]:
        return []


class Host(ServicerBase):
    """One member of the round, on its simulated machine. ended: it has committed or dropped the round."""

    def __init__(self, network: Network, number: int, commit_type: type[CommitProtocol]):
        self.peer_id, self.process = PeerID.from_base58(key_of(number).peer_id), Process([])
        self.node, self._commit_type = Node(network, number, self.peer_id, self.process), commit_type
        self.ended = 0.0

    async def take_part(self, members: Sequence[PeerID]) -> None:
        """The whole round. members: in their order."""
        store, local = AverageBuffer(LAYOUT, CODEC), GradientBuffer(LAYOUT, CODEC)
        local.encode("weight", torch.full((LAYOUT.size,), 1.0 + members.index(self.peer_id)))
        group = RoundGroup(
            name=NAME,
            me=self.peer_id,
            members=members,
            reducers=members,
            shares=(1,) * len(members),
            stub_of=lambda peer: Host.get_stub(self.node, peer),
            traffic=torch.zeros(2, dtype=torch.int64),
            patience=PATIENCE,
            longest=LONGEST,
            limits=dict.fromkeys(map(str, members), 100.0),
        )
        allreduce = PacedAllReduce(group, HashSigner(str(self.peer_id)), local, 8.0, store, "mean")
        allreduce.line = PacedLine()
        self.commit, self.store = self._commit_type(allreduce, {"samples": 8, "loss": 1.0}), store
        await self.add_p2p_handlers(self.node)  # type: ignore[arg-type]
        await allreduce.run()
        await self.commit.run()
        self.ended = loop_time()

    async def _phase(self, group_id: bytes) -> CommitProtocol:
        phase = await self.commit.phase(group_id)
        if phase is None:
            raise ValueError("no such round here")
        return phase

    async def rpc_aggregate_part(
        self, stream: Stream[averaging_pb2.AveragingData], context: P2PContext
    ) -> Stream[averaging_pb2.AveragingData]:
        first = await anext(stream)
        phase = await self._phase(first.group_id)
        async for message in phase.allreduce.rpc_aggregate_part(achain(as_aiter(first), stream), context):
            yield message

    async def rpc_settle(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        return await (await self._phase(group_of(request))).answer(context.remote_id, request)

    async def rpc_fetch_average(
        self, request: runtime_pb2.ExpertInfo, context: P2PContext
    ) -> Stream[runtime_pb2.ExpertInfo]:
        key, parts = wire.PARTS_REQUEST.read(request)
        assert key[:GROUP_BYTES] == NAME.group_id
        async for message in answer(self.store, parts, self.commit.holds):
            yield message


async def _round(deaths: dict[int, float], seed: int, commit_type: type[CommitProtocol]) -> tuple[bool, float]:
    """Whether all who live at the end hold the same average and step, and after how many seconds the last one does."""
    network, began = Network(random.Random(seed), Line(delay=0.05), (), {}), loop_time()
    hosts = [Host(network, number, commit_type) for number in range(MEMBERS)]
    members = sorted((host.peer_id for host in hosts), key=PeerID.to_bytes)
    running = [host.process.run(host.take_part(members)) for host in hosts]
    for number, seconds in deaths.items():
        asyncio.get_running_loop().call_later(seconds, hosts[number].process.kill)
    await asyncio.wait(running)
    living = [host for host in hosts if not host.process.dead]
    for task in (task for task, host in zip(running, hosts, strict=True) if host in living):
        task.result()
    alike = {tuple(host.store.hashes) for host in living}
    seconds = max(host.ended for host in living) - began
    committed = len(alike) == 1 and not any(host.commit.dropped for host in living)
    for host in living:
        host.process.kill()
    await asyncio.sleep(0)
    return committed, seconds


def _run(deaths: dict[int, float], seed: int, commit_type: type[CommitProtocol]) -> tuple[bool, float]:
    try:
        return in_virtual_time(_round(deaths, seed, commit_type))
    finally:
        gc.collect()


def _lives(entropy: random.Random) -> dict[int, float]:
    """Member → second of the round in which it dies, of those that do; somebody does."""
    while True:
        lives = {number: entropy.expovariate(1.0 / LIFE) for number in range(MEMBERS)}
        if min(lives.values()) < ROUND:
            return {number: seconds for number, seconds in lives.items() if seconds < 2 * ROUND}


def measure(rounds: int) -> dict[str, Any]:
    """The figures, of so many rounds in which somebody dies."""
    torch.set_num_threads(1)
    calm, entropy = math.exp(-MEMBERS * ROUND / LIFE), random.Random(0)
    drawn = [_lives(entropy) for _ in range(rounds)]
    figures: dict[str, Any] = {}
    for key, commit_type, share in (("commit_rate_64", CommitProtocol, 1), ("without_backups", WithoutBackups, 6)):
        begun, committed, longer = Counter[str](), Counter[str](), list[float]()
        quiet, seconds = _run({}, 0, commit_type)
        for seed, deaths in enumerate(drawn[: -(-rounds // share)], 1):
            died = str(sum(second < ROUND for second in deaths.values()))
            commits, lasted = _run(deaths, seed, commit_type)
            begun[died] += 1
            committed[died] += commits
            longer += [lasted - seconds] * commits
            print(f"{key} {seed}: {deaths} {'commits' if commits else 'fails'}, {lasted:.1f} s", file=sys.stderr)
        rate = calm * quiet + (1.0 - calm) * committed.total() / begun.total()
        figures[key], figures["round_s"] = round(rate, 3), round(seconds, 1)
        figures[f"{key}_by_deaths"] = {died: [begun[died], committed[died]] for died in sorted(begun)}
        if longer:
            figures[f"{key}_longer_s"] = round(statistics.median(longer), 1)
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))

"""Rounds between members in one process, whose messages go straight to each other."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import achain, as_aiter
from hivemind.utils.crypto import RSAPrivateKey
from optim.settings import normal
from simulation.virtual import VirtualLoop

from tt_cli.run import load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import SENDING, AllReduce
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer
from tt_cli.swarm.allreduce.clipping.centered_clip import Aggregation
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import GROUP_BYTES, RoundName, Signer
from tt_cli.swarm.allreduce.part_fetch import answer
from tt_cli.swarm.allreduce.round_plan import RoundGroup
from tt_cli.swarm.allreduce.votes import Agreement, group_of
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition

SHAPES = {"weight": torch.Size([1100, 1100]), "small": torch.Size([30, 40]), "bias": torch.Size([7])}
WEIGHTS = [10.0, 20.0, 70.0, 30.0]
SIGNERS = sorted(
    (Signer(RSAPrivateKey()) for _ in range(4)), key=lambda one: PeerID.from_base58(one.peer_id).to_bytes()
)
PEERS = [PeerID.from_base58(signer.peer_id) for signer in SIGNERS]
GROUP = hashlib.sha256(b"group").digest()
NAME = RoundName("tiny-12345678", "5_abc", GROUP)
CODEC = codec_of(load_run("emoji").replaced({"swarm.large_tensor": 4096}))
LAYOUT = Partition(SHAPES, 4096, CODEC.block)


class DecodedCopies(DecodedGradients):
    """Every tensor in memory of its own."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).clone()


def flattened(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Large ones first, as in the buffer, without the gaps."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


@dataclass
class Outcome:
    """What a member had after its round."""

    allreduce: AllReduce
    commit: CommitProtocol
    store: AverageBuffer

    @property
    def agreement(self) -> Agreement:
        return self.commit.agreement

    @property
    def average(self) -> torch.Tensor:
        return flattened(dict(DecodedCopies(self.store.buffer)))


class Member:
    """One honest member. Subclasses misbehave. cut: method → whose calls of it get lost.

    shares: of all reducers, equal ones without. weight: its samples, where they are not those of its number.
    """

    client = False
    shares: tuple[int, ...] = ()
    weight: float | None = None
    cut: Mapping[str, Container[PeerID]] = {}
    codec, layout = CODEC, LAYOUT
    allreduce_type: type[AllReduce] = AllReduce
    commit_type: type[CommitProtocol] = CommitProtocol

    def __init__(self, number: int):
        self.number, self.peer = number, PEERS[number]
        self.everybody: dict[PeerID, Member] = {}
        self.patience, self.longest, self.ends = 1.0, 10.0, 1000.0
        self.aggregation: Aggregation = "mean"
        self.allowed: dict[str, float] = {}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: normal(10 * self.number + index, *shape) for index, (name, shape) in enumerate(SHAPES.items())}

    def prepare(self) -> None:
        """Make the two sides of the round."""
        members = sorted(self.everybody, key=PeerID.to_bytes)
        self.store, local = AverageBuffer(self.layout, self.codec), GradientBuffer(self.layout, self.codec)
        for name, gradient in self.gradients().items():
            local.encode(name, gradient)
        reducers = [peer for peer in members if not self.everybody[peer].client]
        group = RoundGroup(
            name=NAME,
            me=self.peer,
            members=members,
            reducers=reducers,
            shares=self.shares or (1,) * len(reducers),
            stub_of=self.stub,
            traffic=torch.zeros(2, dtype=torch.int64),
            patience=self.patience,
            longest=self.longest / SENDING,
            limits={peer: self.allowed.get(peer, 100.0) for peer in map(str, members)},
        )
        weight = WEIGHTS[self.number] if self.weight is None else self.weight
        self.allreduce = self.allreduce_type(group, SIGNERS[self.number], local, weight, self.store, self.aggregation)
        self.commit = self.commit_type(self.allreduce, {"samples": int(weight), "loss": 1.0})
        self.commit._asks_until = self.commit._ends = loop_time() + self.ends

    def reduce_to(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Something else than the average, of which all are sent the same bytes."""
        reducer, honest = self.allreduce.reducer, self.allreduce.reducer._keep

        def keep(place: int, encoded: bytes) -> None:
            part = reducer.parts[place]
            codec, average = self.codec.averages.of(part.large), torch.empty(part.elements)
            codec.decode_into(encoded, average)
            honest(place, codec.encode(change(average)))

        reducer._keep = keep

    def stub(self, peer: PeerID) -> Any:
        """What hivemind gives: calls of another member, in this process."""
        there, me = self.everybody[peer], SimpleNamespace(remote_id=self.peer)

        def reach(method: str) -> None:
            if self.peer in there.cut.get(method, ()):
                raise ConnectionError("cut off")

        async def rpc_aggregate_part(stream: AsyncIterator[averaging_pb2.AveragingData]) -> Any:
            reach("rpc_aggregate_part")
            return there.rpc_aggregate_part(stream, me)

        async def rpc_settle(message: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            reach("rpc_settle")
            return await asyncio.wait_for(there.rpc_settle(message, me), timeout)

        async def rpc_precommit(message: runtime_pb2.ExpertInfo, timeout: float) -> runtime_pb2.ExpertInfo:
            reach("rpc_precommit")
            return await asyncio.wait_for(there.rpc_precommit(message, me), timeout)

        async def rpc_fetch_average(message: runtime_pb2.ExpertInfo) -> Any:
            reach("rpc_fetch_average")
            return there.rpc_fetch_average(message)

        return SimpleNamespace(
            rpc_aggregate_part=rpc_aggregate_part,
            rpc_settle=rpc_settle,
            rpc_precommit=rpc_precommit,
            rpc_fetch_average=rpc_fetch_average,
        )

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        first = await anext(stream)
        phase = await self.commit.phase(first.group_id)
        if phase is None:
            raise ConnectionError("no such round here")
        async for message in phase.allreduce.rpc_aggregate_part(achain(as_aiter(first), stream), context):
            yield message

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        phase = await self.commit.phase(group_of(message))
        if phase is None:
            raise ConnectionError("no such round here")
        return await phase.answer(context.remote_id, message)

    async def rpc_precommit(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        group_id, signed = wire.PRECOMMITTED.read(message)
        phase = await self.commit.phase(group_id)
        if phase is None:
            raise ConnectionError("no such round here")
        return wire.PRECOMMITTED.message((group_id, await phase.precommit(context.remote_id, signed)))

    async def rpc_fetch_average(self, message: runtime_pb2.ExpertInfo) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        key, parts = wire.PARTS_REQUEST.read(message)
        assert isinstance(key, bytes) and key[:GROUP_BYTES] == GROUP
        async for part in answer(self.store, parts, self.commit.holds):
            yield part

    async def take_part(self) -> Outcome | None:
        """The whole round; None from a member that does not come to its end."""
        await self.allreduce.run()
        await self.commit.run()
        return Outcome(self.allreduce, self.commit, self.store)


def run_round(*members: Member) -> list[Outcome]:
    """All members' outcomes, of those that have one, in virtual time: no patience ends because this machine is busy."""

    async def together() -> list[Outcome | None]:
        everybody = {member.peer: member for member in members}
        for member in members:
            member.everybody = everybody
        for member in members:
            member.prepare()
        return await asyncio.wait_for(asyncio.gather(*(member.take_part() for member in members)), 60)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return [outcome for outcome in runner.run(together()) if outcome is not None]


def expected(members: Sequence[Member]) -> numpy.ndarray:
    """The mean over the samples, in double precision."""
    values = [flattened(member.gradients()).double().numpy() for member in members]
    return numpy.average(values, axis=0, weights=[WEIGHTS[member.number] for member in members])

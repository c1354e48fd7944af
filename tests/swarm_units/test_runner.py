"""A whole all-reduce between members in one process: equal bytes for all, and who sends nonsense is left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from optim.settings import normal
from torch import Tensor

from tt_cli.run import load_run
from tt_cli.swarm import runner as room
from tt_cli.swarm.codec import codec_of
from tt_cli.swarm.runner import Runner

SHAPES = [(40_000,), (30, 40), (7,)]
WEIGHTS = [10.0, 20.0, 70.0]
PEERS = [PeerID(bytes([18, 32, *([number] * 32)])) for number in range(3)]


class Member(Runner):
    """A runner whose messages go straight to the others."""

    everybody: dict[PeerID, Member]

    def _get_peer_stub(self, peer: PeerID) -> Any:
        async def rpc_aggregate_part(
            stream: AsyncIterator[averaging_pb2.AveragingData],
        ) -> AsyncIterator[averaging_pb2.AveragingData]:
            return self.everybody[peer].rpc_aggregate_part(stream, SimpleNamespace(remote_id=self.peer_id))

        return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)


class Poisoner(Member):
    """Sends NaN instead of its gradients; takes part like the others otherwise."""

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._generate_input_for_peer(peer_index):
            message.tensor_part.CopyFrom(
                runtime_pb2.Tensor(
                    buffer=b"\x00\x7e" * (message.tensor_part.size[0]),
                    size=message.tensor_part.size,
                    dtype="float32",
                    compression=runtime_pb2.FLOAT16,
                )
            )
            yield message


class Forger(Member):
    """Reduces honestly but answers with parts that are too long."""

    async def _encode_once(self, part_index: int, average: Tensor) -> runtime_pb2.Tensor:
        encoded = await super()._encode_once(part_index, average)
        encoded.buffer += b"\x00"
        return encoded


@dataclass
class Outcome:
    averages: list[Tensor]
    received: float
    rejected: dict[str, str]
    traffic: list[int]


def gradients(seed: int) -> list[Tensor]:
    return [normal(10 * seed + index, *shape) for index, shape in enumerate(SHAPES)]


def all_reduce(*kinds: type[Member]) -> list[Outcome]:
    async def one(member: Member) -> Outcome:
        averages = [average.clone() async for average in member]
        return Outcome(averages, member.received_fraction, dict(member.rejected), member.traffic.tolist())

    async def together() -> list[Outcome]:
        everybody: dict[PeerID, Member] = {}
        for index, (kind, peer) in enumerate(zip(kinds, PEERS, strict=True)):
            everybody[peer] = kind(
                p2p=SimpleNamespace(peer_id=peer),
                servicer_type=Runner,
                prefix=None,
                tensors=gradients(index),
                group_id=b"group",
                ordered_peer_ids=PEERS,
                peer_fractions=(0.3, 0.3, 0.4),
                modes=[AveragingMode.NODE] * len(PEERS),
                weight=WEIGHTS[index],
                codec=codec_of(load_run("emoji").replaced({"swarm.large_tensor": 4096})),
                max_weight=100.0,
                traffic=torch.zeros(2, dtype=torch.int64),
                part_size_bytes=2**14,
                sender_timeout=20.0,
                reducer_timeout=40.0,
            )
            everybody[peer].everybody = everybody
        return await asyncio.wait_for(asyncio.gather(*(one(everybody[peer]) for peer in PEERS)), 60)

    return asyncio.run(together())


def expected(*members: int) -> list[numpy.ndarray]:
    values = [[tensor.double().numpy() for tensor in gradients(member)] for member in members]
    weights = [WEIGHTS[member] for member in members]
    return [numpy.average(each, axis=0, weights=weights) for each in zip(*values, strict=True)]


def test_all_members_receive_the_same_bytes_and_they_are_the_average() -> None:
    outcomes = all_reduce(Member, Member, Member)
    for outcome in outcomes:
        assert outcome.received == 1.0 and outcome.rejected == {}
        for ours, first, right in zip(outcome.averages, outcomes[0].averages, expected(0, 1, 2), strict=True):
            assert torch.equal(ours, first)
            assert numpy.linalg.norm(ours.numpy() - right) < 0.03 * numpy.linalg.norm(right)
        sent, received = outcome.traffic
        whole = sum(tensor.numel() for tensor in outcome.averages)
        assert whole < sent < 4 * whole and whole < received < 4 * whole


def test_a_poisoned_gradient_is_left_out_and_told_by_all() -> None:
    first, second, _ = all_reduce(Member, Member, Poisoner)
    without, with_all = expected(0, 1), expected(0, 1, 2)
    for outcome in (first, second):
        assert outcome.received == 1.0
        assert outcome.rejected == {str(PEERS[2]): "sent values that are not finite"}
        near = []
        for ours, again, honest, whole in zip(outcome.averages, first.averages, without, with_all, strict=True):
            assert torch.equal(ours, again)
            distance = numpy.abs(ours.numpy() - honest)
            near.append(distance.ravel() < 0.1)
            # its own share it reduces itself, with what it should have sent
            assert bool((numpy.minimum(distance, numpy.abs(ours.numpy() - whole)) < 0.1).all())
        assert 0.7 < numpy.concatenate(near).mean() < 1.0


def test_a_reducer_that_answers_nonsense_is_told_and_the_round_is_not_complete() -> None:
    first, second, _ = all_reduce(Member, Member, Forger)
    assert 0.0 < first.received == second.received < 1.0
    for outcome in (first, second):
        assert outcome.rejected.keys() == {str(PEERS[2])}
        assert outcome.rejected[str(PEERS[2])].startswith("sent back a part of ")


def test_an_average_that_is_not_finite_is_never_sent() -> None:
    """Finite gradients may still add up to infinity."""

    async def overflow() -> None:
        with pytest.raises(room.AllreduceException, match="not finite"):
            await Runner._encode_once(SimpleNamespace(), 0, torch.tensor([1.0, float("inf")]))

    asyncio.run(overflow())

"""What members refuse in a round, name its sender for, and go on without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hivemind.proto import averaging_pb2
from swarm.rounds import PEERS, SIGNERS, WEIGHTS, Member, run_round
from swarm.test_allreduce import assert_whole

from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.messages import Opening


class Tampering(Member):
    """Signs one thing and sends another."""

    class Other(AllReduce):
        async def _outgoing(self, indexes: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            async for message in super()._outgoing(indexes):
                changed = bytearray(message.tensor_part.buffer)
                changed[-1] ^= 1
                message.tensor_part.buffer = bytes(changed)
                yield message

    allreduce_type = Other


def opening(change: Callable[[AllReduce, Opening], bytes | None]) -> type[Member]:
    """A member whose streams begin with something else than its opening; None: with nothing of the kind."""

    class Opens(AllReduce):
        async def _opened(self, opening: bytes, outgoing: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
            other = change(self, Opening.read(opening))
            async for message in outgoing if other is None else super()._opened(other, outgoing):
                yield message

    return type("Opens", (Member,), {"allreduce_type": Opens})


UNSIGNED = opening(lambda allreduce, mine: None)
REPLAYING = opening(lambda allreduce, mine: mine.sign(SIGNERS[1]))
OTHER_ROUND = opening(
    lambda allreduce, mine: replace(mine, name=replace(allreduce.name, state_key="4_old")).sign(SIGNERS[2])
)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Tampering, "did not sign"),
        (UNSIGNED, "without a signature"),
        (REPLAYING, "signed for another round or by somebody else"),
        (OTHER_ROUND, "signed for another round or by somebody else"),
    ],
)
def test_what_the_sender_did_not_sign_for_this_round_is_refused(kind: type[Member], why: str) -> None:
    outcomes = run_round(Member(0), Member(1), kind(2))
    assert_whole(outcomes)
    for outcome in outcomes[:2]:
        assert why in outcome.allreduce.rejected[str(PEERS[2])]


def test_who_claims_more_samples_than_it_published_is_left_out() -> None:
    members = [Member(0), Member(1), Member(2)]
    for member in members:
        member.allowed = {str(PEERS[2]): WEIGHTS[2] - 1.0}
    outcomes = run_round(*members)
    assert_whole(outcomes)
    for outcome in outcomes[:2]:
        assert "weight 70.0 outside 1 to 69" in outcome.allreduce.rejected[str(PEERS[2])]


class DrippingReducer(Member):
    """Answers each time just before the others lose their patience."""

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            await asyncio.sleep(1.5 * self.patience)
            yield message


def test_a_reducer_that_drips_is_given_up_and_named() -> None:
    members = [Member(0), Member(1), DrippingReducer(2)]
    for member in members:
        member.patience, member.longest = 0.5, 0.5
    outcomes = run_round(*members)
    for outcome in outcomes[:2]:
        assert outcome.allreduce.failed.keys() == {str(PEERS[2])}
        assert not outcome.agreement.lost, "it has them itself: they are fetched"


class Boundless(Member):
    """Reduces to numbers that no average can be."""

    def prepare(self) -> None:
        super().prepare()
        self.reduce_to(lambda average: torch.full_like(average, 6e4))


def test_an_average_that_cannot_be_is_refused_and_its_reducer_named() -> None:
    outcomes = run_round(Member(0), Member(1), Boundless(2))
    for outcome in outcomes[:2]:
        assert "beyond 1000 times what is usual" in outcome.allreduce.rejected[str(PEERS[2])]

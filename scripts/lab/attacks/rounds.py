"""What a member does wrong inside one averaging round: each entry of `ROUNDS` changes the two sides of one round.

They hook in where messages leave: whatever the run's defences look at, they see it as it comes from another machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hivemind.proto import averaging_pb2, runtime_pb2

from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import Opening, input_hash
from tt_cli.swarm.compression.gradient_buffer import TensorPart

ENDLESS = 10**5  # messages more than were asked for, then this attacker is tired too
Message: TypeAlias = averaging_pb2.AveragingData
Change = Callable[["Round", TensorPart, Message], None]


@dataclass
class Round:
    """The attacker's own two sides of a round. number: which of the attackers it is, from 0. step: that it makes."""

    allreduce: AllReduce
    commit: CommitProtocol
    number: int = 0
    step: int = 0


def sends(change: Change) -> Callable[[Round], None]:
    """An attack that changes every part of the gradient on its way out."""

    def spoil(attacked: Round) -> None:
        allreduce = attacked.allreduce
        honest = allreduce._outgoing

        async def outgoing(indexes: Any) -> AsyncIterator[Message]:
            place = 0
            async for message in honest(indexes):
                change(attacked, allreduce.parts[indexes[place]], message)
                place += 1
                yield message

        async def opening(reducer: Any) -> Opening:
            """It signs what it sends."""
            true = await signed(reducer)
            sent = [message async for message in outgoing(allreduce.parts_of(reducer))]
            hashes = tuple(input_hash(message.tensor_part.buffer) for message in sent)
            return dataclasses.replace(true, weight=sent[0].weight if sent else true.weight, hashes=hashes)

        signed = allreduce._opening
        allreduce._outgoing = outgoing  # type: ignore[method-assign]
        allreduce._opening = opening  # type: ignore[method-assign]

    return spoil


def weighs(weight: float) -> Change:
    """Claims so many samples."""

    def change(_: Round, part: TensorPart, message: Message) -> None:
        message.weight = weight

    return change


def filled(value: float, weight: float | None = None) -> Change:
    """Every scale of a large tensor, every number of a small one: `value`, or the largest that fp16 can carry."""
    scale = torch.tensor([value / 127], dtype=torch.bfloat16)
    scale_bytes = scale.view(torch.uint8).numpy().tobytes()
    small = torch.tensor([value if math.isinf(value) else min(value, 65504.0)], dtype=torch.float16)
    small_bytes = small.view(torch.uint8).numpy().tobytes()

    def change(attacked: Round, part: TensorPart, message: Message) -> None:
        tensor, codec = message.tensor_part, attacked.allreduce.codec
        if part.large:
            tensor.buffer = scale_bytes * -(-part.elements // codec.block) + b"\x7f" * part.elements
        else:
            tensor.buffer = small_bytes * part.elements
        if weight is not None:
            message.weight = weight

    return change


def halved(attacked: Round, part: TensorPart, message: Message) -> None:
    """The first half of the part, well-formed for that size."""
    _resized(attacked, part, message, max(1, part.elements // 2))


def of_one_element(attacked: Round, part: TensorPart, message: Message) -> None:
    """Shape [1], which a careless sum broadcasts."""
    _resized(attacked, part, message, 1)


def _resized(attacked: Round, part: TensorPart, message: Message, elements: int) -> None:
    codec = attacked.allreduce.codec
    encoded = codec.of(part.large).encode(torch.ones(elements))
    message.tensor_part.CopyFrom(codec.message(encoded, elements, part.large))


def declared_huge(_: Round, part: TensorPart, message: Message) -> None:
    """2^40 elements in a few bytes."""
    del message.tensor_part.size[:]
    message.tensor_part.size.extend([2**20, 2**20])


def endless(attacked: Round) -> None:
    """Goes on sending after its last part, and after its last average."""
    allreduce = attacked.allreduce
    send, answer = allreduce._outgoing, allreduce.rpc_aggregate_part

    async def outgoing(indexes: Any) -> AsyncIterator[Message]:
        last = None
        async for last in send(indexes):
            yield last
        for _ in range(ENDLESS if last is not None else 0):
            yield last

    async def rpc_aggregate_part(stream: Any, context: Any) -> AsyncIterator[Message]:
        sent, last = 0, None
        answers = answer(stream, context)
        async for last in answers:
            yield last
            sent += 1
            if sent == len(allreduce.reducer.parts):  # it would wait for the other side to hang up
                break
        for _ in range(ENDLESS if last is not None else 0):
            yield last

    allreduce._outgoing = outgoing  # type: ignore[method-assign]
    allreduce.rpc_aggregate_part = rpc_aggregate_part  # type: ignore[method-assign]


def lying(attacked: Round) -> None:
    """Reduces to the negative of the average, and sends all the same bytes."""
    allreduce = attacked.allreduce
    reducer = allreduce.reducer
    honest = reducer._keep

    def keep(position: int, encoded: bytes) -> None:
        part = reducer.parts[position]
        average = torch.empty(part.elements)
        allreduce.codec.of(part.large).decode_into(encoded, average)
        honest(position, allreduce.codec.of(part.large).encode(average.neg_()))

    reducer._keep = keep


def slow_loris(attacked: Round) -> None:
    """Always just in time for the next message, and never done: as a sender, as a reducer, or when members settle."""
    allreduce, commit = attacked.allreduce, attacked.commit
    send, answer, settle = allreduce._outgoing, allreduce.rpc_aggregate_part, commit.answer
    pause = 0.8 * allreduce.patience

    async def outgoing(indexes: Any) -> AsyncIterator[Message]:
        async for message in send(indexes):
            yield message
            await asyncio.sleep(pause)

    async def rpc_aggregate_part(stream: Any, context: Any) -> AsyncIterator[Message]:
        async for message in answer(stream, context):
            await asyncio.sleep(2 * pause)  # who waits for an average is patient for twice as long
            yield message

    async def settling(peer: Any, request: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
        await asyncio.sleep(0.8 * commit.patience)
        return await settle(peer, request)

    if attacked.number % 3 == 0:
        allreduce._outgoing = outgoing  # type: ignore[method-assign]
    elif attacked.number % 3 == 1:
        allreduce.rpc_aggregate_part = rpc_aggregate_part  # type: ignore[method-assign]
    else:
        commit.answer = settling  # type: ignore[method-assign]


ROUNDS: dict[str, Callable[[Round], None]] = {
    "weight 1e9": sends(weighs(1e9)),
    "weight negative": sends(weighs(-1e3)),
    "weight NaN": sends(weighs(math.nan)),
    "NaN part": sends(filled(math.nan)),
    "Inf part": sends(filled(math.inf)),
    "NaN at weight 0": sends(filled(math.nan, weight=0.0)),
    "1e30": sends(filled(1e30)),
    "half part": sends(halved),
    "shape [1]": sends(of_one_element),
    "huge declared size": sends(declared_huge),
    "endless stream": endless,
    "lying reducer": lying,
    "slow-loris peer": slow_loris,
}

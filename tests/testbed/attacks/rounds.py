"""What a member does wrong inside one averaging round: each entry of `ROUNDS` makes its conduct there."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2

from testbed.conduct import Conduct, Message, Messages, Silence
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.average_buffer import part_hash
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import Commitment, Opening, input_hash
from tt_cli.swarm.compression.gradient_buffer import TensorPart

ENDLESS = 10**5  # messages more than were asked for, then this attacker is tired too
Change = Callable[[AllReduce, TensorPart, Message], None]


class Sends(Conduct):
    """Changes every part of the gradient on its way out, and signs what it sends."""

    def __init__(self, change: Change):
        self._change = change

    async def sends(self, allreduce: AllReduce, indexes: Sequence[int], messages: Messages) -> Messages:
        place = 0
        async for message in messages:
            self._change(allreduce, allreduce.parts[indexes[place]], message)
            place += 1
            yield message

    async def opens(self, allreduce: AllReduce, reducer: PeerID, opening: Opening) -> Opening:
        sent = [message async for message in allreduce._outgoing(allreduce.parts_of(reducer))]
        hashes = tuple(input_hash(message.tensor_part.buffer) for message in sent)
        return dataclasses.replace(opening, weight=sent[0].weight if sent else opening.weight, hashes=hashes)


def weighs(weight: float) -> Change:
    """Claims so many samples."""

    def change(_: AllReduce, part: TensorPart, message: Message) -> None:
        message.weight = weight

    return change


def unpublished(allreduce: AllReduce, part: TensorPart, message: Message) -> None:
    """Claims as much as is not refused: four target batches of who published none."""
    message.weight = max(allreduce.group.limits.values())


def filled(value: float, weight: float | None = None) -> Change:
    """Every scale of a large tensor, every number of a small one: `value`, or the largest that fp16 can carry."""
    scale = torch.tensor([value / 127], dtype=torch.bfloat16)
    scale_bytes = scale.view(torch.uint8).numpy().tobytes()
    small = torch.tensor([value if math.isinf(value) else min(value, 65504.0)], dtype=torch.float16)
    small_bytes = small.view(torch.uint8).numpy().tobytes()

    def change(allreduce: AllReduce, part: TensorPart, message: Message) -> None:
        tensor, codec = message.tensor_part, allreduce.codec
        if part.large:
            tensor.buffer = scale_bytes * -(-part.elements // codec.block) + b"\x7f" * part.elements
        else:
            tensor.buffer = small_bytes * part.elements
        if weight is not None:
            message.weight = weight

    return change


def halved(allreduce: AllReduce, part: TensorPart, message: Message) -> None:
    """The first half of the part, well-formed for that size."""
    _resized(allreduce, part, message, max(1, part.elements // 2))


def of_one_element(allreduce: AllReduce, part: TensorPart, message: Message) -> None:
    """Shape [1], which a careless sum broadcasts."""
    _resized(allreduce, part, message, 1)


def _resized(allreduce: AllReduce, part: TensorPart, message: Message, elements: int) -> None:
    codec = allreduce.codec
    encoded = codec.of(part.large).encode(torch.ones(elements))
    message.tensor_part.CopyFrom(codec.message(encoded, elements, part.large))


def declared_huge(_: AllReduce, part: TensorPart, message: Message) -> None:
    """2^40 elements in a few bytes."""
    del message.tensor_part.size[:]
    message.tensor_part.size.extend([2**20, 2**20])


class Endless(Conduct):
    """Goes on sending after its last part, and after its last average."""

    async def sends(self, allreduce: AllReduce, indexes: Sequence[int], messages: Messages) -> Messages:
        last = None
        async for last in messages:
            yield last
        for _ in range(ENDLESS if last is not None else 0):
            yield last

    async def answers(self, allreduce: AllReduce, peer: PeerID, messages: Messages) -> Messages:
        sent, last = 0, None
        async for last in messages:
            yield last
            sent += 1
            if sent == len(allreduce.reducer.parts):  # it would wait for the other side to hang up
                break
        for _ in range(ENDLESS if last is not None else 0):
            yield last


def negative(allreduce: AllReduce, place: int, encoded: bytes) -> bytes:
    """Of the average of one of its own parts."""
    part = allreduce.reducer.parts[place]
    codec, average = allreduce.store.codec.of(part.large), torch.empty(part.elements)
    codec.decode_into(encoded, average)
    return codec.encode(average.neg_())


class LyingReducer(Conduct):
    """Reduces to the negative of the average, and sends all the same bytes."""

    def reduces(self, allreduce: AllReduce, place: int, encoded: bytes) -> bytes:
        return negative(allreduce, place, encoded)


class EvasiveReducer(LyingReducer):
    """And leaves audits unanswered: it refuses them, or says nothing at all."""

    def __init__(self, number: int):
        self._refuses = number % 2

    def shows(self, show: Callable[[], bytes]) -> bytes:
        raise ValueError("not today") if self._refuses else Silence


class TwoFacedReducer(Conduct):
    """Sends every other member the negative of the average, and signs for each what it sends to it."""

    async def answers(self, allreduce: AllReduce, peer: PeerID, messages: Messages) -> Messages:
        deceived, place = allreduce.members.index(peer) % 2, 0
        hashes = []
        async for message in messages:
            if deceived and place < len(allreduce.reducer.parts):
                message.tensor_part.buffer = negative(allreduce, place, message.tensor_part.buffer)
                hashes.append(part_hash(message.tensor_part.buffer))
                place += 1
                if message.peer_id:
                    signed = Commitment.read(allreduce.commitment)
                    message.peer_id = dataclasses.replace(signed, outputs=tuple(hashes)).sign(allreduce.signer)
            yield message


class FalseLeader(Conduct):
    """Says of all others that they accept no connections, where it leads: the average would be what it says."""

    def leads(self, group: GroupInfo, me: PeerID) -> tuple[bytes, ...]:
        members = zip(group.peer_ids, group.gathered, strict=True)
        return tuple(entry if peer == me else self._deaf(entry) for peer, entry in members)

    @staticmethod
    def _deaf(entry: bytes) -> bytes:
        """This entry, with the signature that it had."""
        bandwidth, _, signed = wire.GATHERED.read(entry)
        join, votes = wire.SIGNED_JOIN.read(signed)
        body, key, signature = wire.ENVELOPE.read(join)
        kind, run, state_key, leader, signed_at, _, *shown = wire.JOIN.read(body)
        said = wire.JOIN.pack((kind, run, state_key, leader, signed_at, False, *shown))
        envelope = wire.SIGNED_JOIN.pack((wire.ENVELOPE.pack((said, key, signature)), votes))
        return wire.GATHERED.pack((bandwidth, AveragingMode.CLIENT.value, envelope))


class SlowLoris(Conduct):
    """Always just in time for the next message, and never done: as a sender, as a reducer, or when members commit."""

    def __init__(self, number: int):
        self._where = ("sends", "answers", "is asked")[number % 3]

    async def sends(self, allreduce: AllReduce, indexes: Sequence[int], messages: Messages) -> Messages:
        async for message in messages:
            yield message
            if self._where == "sends":
                await asyncio.sleep(0.8 * allreduce.patience)

    async def answers(self, allreduce: AllReduce, peer: PeerID, messages: Messages) -> Messages:
        async for message in messages:
            if self._where == "answers":
                await asyncio.sleep(1.6 * allreduce.patience)  # who waits for an average is patient for twice as long
            yield message

    async def is_asked(
        self, commit: CommitProtocol, answer: Callable[[], Awaitable[runtime_pb2.ExpertInfo]]
    ) -> runtime_pb2.ExpertInfo:
        if self._where == "is asked":
            await asyncio.sleep(0.8 * commit.patience)
        return await answer()


def sends(change: Change) -> Callable[[int], Conduct]:
    return lambda number: Sends(change)


ROUNDS: dict[str, Callable[[int], Conduct]] = {
    "weight 1e9": sends(weighs(1e9)),
    "weight negative": sends(weighs(-1e3)),
    "weight 1e-20": sends(weighs(1e-20)),
    "weight NaN": sends(weighs(math.nan)),
    "NaN part": sends(filled(math.nan)),
    "Inf part": sends(filled(math.inf)),
    "NaN at weight 0": sends(filled(math.nan, weight=0.0)),
    "1e30": sends(filled(1e30)),
    "half part": sends(halved),
    "shape [1]": sends(of_one_element),
    "huge declared size": sends(declared_huge),
    "endless stream": lambda number: Endless(),
    "weight never published": sends(unpublished),
    "lying reducer": lambda number: LyingReducer(),
    "evasive reducer": EvasiveReducer,
    "two-faced reducer": lambda number: TwoFacedReducer(),
    "slow-loris peer": SlowLoris,
    "false leader": lambda number: FalseLeader(),
}
"""Attack → (which of the attackers it is, from 0) → its conduct in a round."""

"""What a member of a round says of it, and what comes of all members' votes on its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from hivemind.proto import runtime_pb2

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, MISSING
from tt_cli.swarm.allreduce.messages import SignedVote


@dataclass(frozen=True)
class PartStatus:
    """One member's word about a round. hashes: its votes on the parts, or MISSING. said: samples and loss.

    vote: what it signed, once it votes on all parts; b"" before. commitment: to what it reduced (messages.py), b""
    without. clipped: peer id → of how many parts it clipped them. others: peer id → what that member signed, b"" where
    it was not heard. dropped: it will not step with this average. votes: peer id → the vote of that member as it was
    heard, of those who vote otherwise. waited: peer id → seconds for which it waited for that one, not checked.
    """

    hashes: tuple[bytes, ...]
    said: dict[str, Any]
    vote: bytes = b""
    commitment: bytes = b""
    clipped: dict[str, int] = field(default_factory=dict)
    others: dict[str, bytes] = field(default_factory=dict)
    dropped: bool = False
    votes: dict[str, bytes] = field(default_factory=dict)
    waited: object = None

    def pack(self, group_id: bytes) -> runtime_pb2.ExpertInfo:
        """The message that carries it."""
        said = {**self.said, "waited": self.waited} if self.waited else self.said
        joined = b"".join(self.hashes)
        rest = self.commitment, self.clipped, self.others, self.dropped, self.votes
        return wire.STATUS.message((group_id, joined, self.vote, said, *rest))


def read_status(message: bytes | runtime_pb2.ExpertInfo, parts: int) -> PartStatus:
    """Raises ValueError for anything else than the status of a round with so many parts."""
    _, joined, vote, said, commitment, clipped, others, dropped, votes = wire.STATUS.read(message)
    if len(joined) != HASH_BYTES * parts:
        raise ValueError("a status of another round")
    samples, loss = said.get("samples"), said.get("loss")
    honest = isinstance(samples, int) and 0 <= samples <= 10**12 and isinstance(loss, float) and math.isfinite(loss)
    hashes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    counted = all(
        isinstance(peer, str) and isinstance(count, int) and 0 < count <= parts for peer, count in clipped.items()
    )
    known = {"samples": samples, "loss": loss} if honest else {}
    rest = clipped if counted else {}, others, dropped, votes, said.get("waited")
    return PartStatus(hashes, known, vote, commitment, *rest)


def group_of(message: bytes | runtime_pb2.ExpertInfo) -> bytes:
    """The round that a status belongs to. Raises ValueError for anything else than a status."""
    return wire.STATUS.read(message)[0]


@dataclass(frozen=True)
class Agreement:
    """wanted: part → (hash, members that vote for it) of what must be fetched. lost: parts without a vote.

    disputed: parts with unlike votes, none of them a quorum's. unconfirmed: with alike ones, too few. differing: parts
    on which some votes differed. unheard: words where too few members were heard, "" else.
    """

    wanted: dict[int, tuple[bytes, list[str]]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    disputed: list[int] = field(default_factory=list)
    unconfirmed: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    unheard: str = ""

    @property
    def reached(self) -> bool:
        """True when every part can be had, and the round need not be dropped."""
        return not (self.lost or self.disputed or self.unconfirmed or self.unheard)


def liars_among(voices: Fraction | int) -> int:
    """The largest number below a third of so many: as many may lie."""
    return max(0, -(-voices // 3) - 1)


def is_quorum(some: Fraction | int, voices: Fraction | int, liars: int = 0) -> bool:
    """True for so many of all that they may commit together: two such sets have an honest one in common.

    liars: how many may be among all of them, where they are a part of a swarm.
    """
    return 2 * some > voices + max(liars_among(voices), liars)


def most_say(numbers: Mapping[str, int], voices: Mapping[str, Fraction | int]) -> int:
    """The largest number that more than half of the voices reach. numbers: by peer id, of some of them."""
    half = Fraction(sum(voices[peer] for peer in numbers), 2)
    return max(n for n in numbers.values() if sum(voices[peer] for peer, said in numbers.items() if said >= n) > half)


@dataclass(frozen=True, order=True)
class LockedAverage:
    """An average that a group repeats, as somebody may have made it a step: its attempt, voices, cut and hash."""

    attempt: int
    voices: Fraction | int
    shares: tuple[int, ...]
    average: bytes


def locked_by(votes: Iterable[SignedVote], voices: Mapping[str, Fraction | int], liars: int) -> LockedAverage | None:
    """The average that a group repeats; None where it makes a new one.

    More of the group must have signed votes for it than may lie: one of them does not. Of several such averages it is
    the one of the latest attempt: had an earlier one been made a step, that attempt would have repeated it. votes: all
    that were shown. voices: peer id → share of a voice, of the group's members.
    """
    last = defaultdict[tuple[tuple[int, ...], bytes], dict[str, int]](dict)
    for vote in votes:
        if vote.voter in voices:
            said = last[vote.shares, vote.average]
            said[vote.voter] = max(vote.attempt, said.get(vote.voter, 0))
    ranked = []
    for (shares, average), said in last.items():
        heard = Fraction(0)
        for attempt, peer in sorted(((attempt, peer) for peer, attempt in said.items()), reverse=True):
            heard += voices[peer]
            if heard > liars:
                ranked.append(LockedAverage(attempt, sum(map(voices.__getitem__, said)), shares, average))
                break
    return max(ranked, default=None)


Electorates = Sequence[tuple[Mapping[str, Fraction | int], Fraction | int, int]]
"""Voices of some, how many there are in all, and how many of them may lie at least: of each a quorum is needed."""


def electorates_of(
    voices: Mapping[str, Fraction | int],
    liars: int = 0,
    steps: Collection[str] = (),
    trainers: Mapping[str, Fraction | int] = MappingProxyType({}),
    swarm: Fraction | int = 0,
) -> Electorates:
    """All members of a round, those of them who have made steps, where some have, and the trainers.

    voices: of all of them. liars: how many voices of the swarm may lie. Newcomers do not know how many lie: what is
    enough for them is so for those who have made steps. trainers, swarm: those of whom, wherever they are, and of how
    many voices in all a quorum is needed: whoever is told of two groups votes in one of them.
    """
    with_steps = {peer: voice for peer, voice in voices.items() if peer in steps}
    electorates = [(voices, sum(voices.values()), liars)]
    electorates += [(with_steps, sum(with_steps.values()), 0)] if steps else []
    return electorates + ([(trainers, swarm, 0)] if swarm else [])


def are_enough(peers: Iterable[str], electorates: Electorates) -> bool:
    """True for a quorum of each electorate."""
    there = set(peers)
    return all(
        is_quorum(sum(those[peer] for peer in there & those.keys()), total, lying)
        for those, total, lying in electorates
    )


def agree(
    held: Sequence[bytes],
    votes: Mapping[str, Sequence[bytes]],
    electorates: Electorates,
    dropped: Collection[str] = (),
) -> Agreement:
    """The outcome of comparing votes. held: hashes of what this member has. votes: peer id → those that were heard.

    electorates: of whom a quorum is needed. dropped: those who have dropped the round. A quorum must be heard that has
    not dropped it, and each part needs the votes of one.
    """
    voices, gone = electorates[0][0], set(dropped)
    few = f"heard from {len(votes) - len(dropped) - 1} of {len(voices) - 1} others"
    agreement = Agreement(unheard="" if are_enough(votes.keys() - gone, electorates) else few)
    for index, mine in enumerate(held):
        voters = defaultdict[bytes, list[str]](list)
        for peer, each in votes.items():
            if each[index] != MISSING:
                voters[each[index]].append(peer)
        if not voters:
            agreement.lost.append(index)
            continue
        best = max(voters, key=lambda vote: sum(voices[peer] for peer in voters[vote]))
        if len(voters) > 1:
            agreement.differing.append(index)
        if not are_enough({*voters[best]} - gone, electorates):
            (agreement.disputed if len(voters) > 1 else agreement.unconfirmed).append(index)
        elif best != mine:
            agreement.wanted[index] = (best, voters[best])
    return agreement

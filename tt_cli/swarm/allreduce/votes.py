"""What a member of a round says of it, and what comes of all members' votes on its parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.proto import runtime_pb2

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, MISSING


@dataclass(frozen=True)
class PartStatus:
    """One member's word about a round. hashes: its votes on the parts, or MISSING. said: samples and loss.

    commitment: to what it reduced (messages.py), b"" without. clipped: peer id → of how many parts it clipped them.
    others: peer id → what that member signed, b"" where it was not heard. dropped: it will not step with this average.
    waited: peer id → seconds for which it waited for that one, not checked.
    """

    hashes: tuple[bytes, ...]
    said: dict[str, Any]
    commitment: bytes = b""
    clipped: dict[str, int] = field(default_factory=dict)
    others: dict[str, bytes] = field(default_factory=dict)
    dropped: bool = False
    waited: object = None

    def pack(self, group_id: bytes) -> runtime_pb2.ExpertInfo:
        """The message that carries it."""
        said = {**self.said, "waited": self.waited} if self.waited else self.said
        joined = b"".join(self.hashes)
        return wire.STATUS.message((group_id, joined, said, self.commitment, self.clipped, self.others, self.dropped))


def read_status(message: bytes | runtime_pb2.ExpertInfo, parts: int) -> PartStatus:
    """Raises ValueError for anything else than the status of a round with so many parts."""
    _, joined, said, commitment, clipped, others, dropped = wire.STATUS.read(message)
    if len(joined) != HASH_BYTES * parts:
        raise ValueError("a status of another round")
    samples, loss = said.get("samples"), said.get("loss")
    honest = isinstance(samples, int) and 0 <= samples <= 10**12 and isinstance(loss, float) and math.isfinite(loss)
    hashes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    counted = all(
        isinstance(peer, str) and isinstance(count, int) and 0 < count <= parts for peer, count in clipped.items()
    )
    known = {"samples": samples, "loss": loss} if honest else {}
    return PartStatus(hashes, known, commitment, clipped if counted else {}, others, dropped, said.get("waited"))


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


def quorum(members: int) -> int:
    """Of so many members, as many as commit together: two such sets share an honest one where less than a third lie."""
    return (members + (members - 1) // 3) // 2 + 1


def agree(
    held: Sequence[bytes],
    votes: Sequence[bytes],
    others: Mapping[str, Sequence[bytes]],
    silent: int = 0,
    dropped: Collection[str] = (),
) -> Agreement:
    """The outcome of comparing votes. held: hashes of what this member has. others: peer id → votes.

    silent: how many more there are from whom nothing was heard. dropped: those of `others` that have dropped the round.
    A quorum of all must be heard that has not, and each part needs the votes of as many.
    """
    there, all_others = 1 + len(others) - len(dropped), len(others) + silent
    needed = quorum(1 + all_others)
    few = f"heard from {there - 1} of {all_others} others" if there < needed else ""
    agreement = Agreement(unheard=few)
    for index, mine in enumerate(votes):
        counted = Counter(each[index] for each in (votes, *others.values()) if each[index] != MISSING)
        if not counted:
            agreement.lost.append(index)
            continue
        best = counted.most_common(1)[0][0]
        voters = [peer for peer, each in others.items() if each[index] == best]
        if len(counted) > 1:
            agreement.differing.append(index)
        if (mine == best) + len({*voters} - {*dropped}) < needed:
            (agreement.disputed if len(counted) > 1 else agreement.unconfirmed).append(index)
        elif best != held[index]:
            agreement.wanted[index] = (best, voters)
    return agreement

"""The members of a round: whom the records name, who of them leads, whether they are enough, and who came."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID

from tt_cli.swarm.allreduce.messages import RoundName, SignedVote, average_hash
from tt_cli.swarm.allreduce.votes import is_quorum, liars_among
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, NOBODY, Partition, TensorPart
from tt_cli.swarm.records.peer_record import PeerRecord

SPOILED, TOO_FEW = "who spoiled a round", "trainers came"
SPARE = 2.0  # times the samples that a member may claim: records are a few seconds old, and speeds are means


@dataclass(frozen=True)
class RoundPlan:
    """The members that should average together, and where they meet. Plans of the same members and step are equal.

    state_key: names the state from which the round starts. members: peer ids, this peer included. leader: the one that
    the others go to; "" when none of them accepts connections. swarm: voices of the trainers of whom a group must hold
    a quorum, whatever they hold. voices: peer id → share of a voice, of each of these; without any each member has one.
    avoided: peers with which no group is formed. welcome: those that a leader takes in, None for all. allowed: peer id
    → samples that it may claim. steps: this peer has made some. newcomer: it has not, and others have.
    """

    state_key: str = ""
    members: frozenset[str] = frozenset()
    leader: str = ""
    swarm: Fraction | int = 2
    voices: Mapping[str, Fraction | int] = field(default_factory=dict, compare=False)
    avoided: frozenset[str] = field(default=frozenset(), compare=False)
    welcome: frozenset[str] | None = field(default=None, compare=False)
    allowed: Mapping[str, float] = field(default_factory=dict, compare=False)
    steps: bool = field(default=True, compare=False)
    newcomer: bool = field(default=False, compare=False)

    @classmethod
    def of(
        cls,
        state_key: str,
        records: Sequence[PeerRecord],
        voices: Mapping[str, Fraction | int],
        turn: int = 0,
        here: Iterable[PeerRecord] = (),
    ) -> RoundPlan:
        """A round of the peers of these records, led by one of those that accept connections, who has a voice if any.

        And votes, if more do than may lie: newcomers know no others. In every second turn it is any of `here`, who hold
        the state: of these all know alike. voices, turn: see `RoundPlan` and `leader_of`.
        """
        members = frozenset(record.peer_id for record in records)
        able = [record for record in records if not record.client_mode]
        able = [record for record in able if voices.get(record.peer_id)] or able
        voting = [record for record in able if record.vote]
        leading = voting if len(voting) > liars_among(len(able)) else able
        if turn % 2:
            leading = [record for record in here if not record.client_mode] or leading
        leader = leader_of(state_key, tuple(record.peer_id for record in leading), turn)
        swarm = sum(voices.values()) if voices else len(members)
        return cls(state_key, members, leader, swarm, voices)

    @property
    def enough(self) -> bool:
        """A quorum of the trainers' voices: no others make the same step. A newcomer sees that of the group alone."""
        return self._are_enough(self.members) or (self.newcomer and len(self.members) > 1)

    def _counting(self, peers: Iterable[str]) -> list[str]:
        return [peer for peer in peers if peer in self.voices or not self.voices]

    def _are_enough(self, peers: Iterable[str]) -> bool:
        return is_quorum(sum(self.voices.get(peer, 1) for peer in self._counting(peers)), self.swarm)

    def check_votes(self, signers: Collection[str]) -> None:
        """Raise ValueError where all of those trainers who voted for an average may lie."""
        if sum(self.voices.get(peer, 0) for peer in signers) <= liars_among(self.swarm):
            raise ValueError(f"{len(signers)} votes of {len(self.voices)} trainers")

    @property
    def lacking(self) -> str:
        """Words about whom the members need for a step; "" when they are enough."""
        if not self.enough:
            return f"for more than {len(self._counting(self.members))} of {len(self.voices) or self.swarm} trainers"
        return "" if self.leader else "in client mode, for a trainer that accepts connections"

    def takes(self, peer_id: str) -> bool:
        """True if a leader lets it into the group."""
        return peer_id not in self.avoided and (self.welcome is None or peer_id in self.welcome)

    def check(self, group: GroupInfo, with_steps: int = 0) -> None:
        """Raise ValueError for a group in which no round may begin. with_steps: others that have made some.

        Of two groups that both are a quorum of the trainers an honest one is in both: a state has one successor. Whom a
        newcomer knows only by records may not exist: it relies on those in the group who have made steps, of whom one
        does not lie.
        """
        if spoilers := self.avoided.intersection(map(str, group.peer_ids)):
            raise ValueError(f"the group includes {', '.join(sorted(spoilers))}, {SPOILED}")
        if len(group.peer_ids) > MAX_MEMBERS:
            raise ValueError(f"a group with {len(group.peer_ids)} members: up to {MAX_MEMBERS} there may be")
        vouched = self.newcomer and with_steps > liars_among(len(group.peer_ids))
        came = self._counting(map(str, group.peer_ids))
        if not (vouched or self._are_enough(came)):
            raise ValueError(f"only {len(came)} of {max(len(self.voices), math.ceil(self.swarm))} {TOO_FEW}")


@functools.lru_cache(maxsize=16)  # each look at the records asks
def leader_of(state_key: str, peers: tuple[str, ...], turn: int = 0) -> str:
    """The leader among these of a state's groups in this turn: the smallest hash of all three. "" without peers."""
    return min(peers, key=lambda peer: hashlib.sha256(f"{state_key} {peer} {turn}".encode()).digest(), default="")


def longest_search(matchmaking_time: float) -> float:
    """Seconds for which a group is sought at most."""
    return 2 * matchmaking_time + 1.0


def claim_limits(records: Iterable[PeerRecord], now: float) -> dict[str, float]:
    """Peer id → samples that it may claim in a round: those in its record, and what it can have computed since.

    now: DHT time. Who has published none yet, or no speed, is not in it.
    """
    return {
        record.peer_id: SPARE
        * (record.samples + record.samples_per_second * max(0.0, now - record.time) + record.micro_batch)
        for record in records
        if record.samples and record.samples_per_second
    }


@dataclass(frozen=True)
class Contribution:
    """This peer's part in a round, beside its gradient.

    samples: behind the gradient. loss: summed over them. allowed, swarm: as in the newest `RoundPlan`.
    """

    samples: int
    loss: float
    allowed: Mapping[str, float] = field(default_factory=dict)
    swarm: Fraction | int = 0


@dataclass(frozen=True)
class RoundGroup:
    """The members of a round that has begun, and how one of them reaches the others.

    members: in the order of their ids' bytes. reducers: those of them that accept connections, in the same order, no
    more than MAX_REDUCERS. shares: of the average that each of these reduces, as integers of their sum. stub_of: peer
    id → hivemind stub. traffic: int64 (2,), bytes sent and received, counted up. patience: seconds to wait for a
    sender's next part. longest: seconds for the whole round. limits: peer id → samples that it may claim, of all
    members in their order. voices: peer id → share of a voice, of all members, by the passes with which they joined.
    trainers, swarm: the same of the trainers, in the group or not, and their sum; that is 0 for a newcomer, who may
    know of some that do not exist. steps: members that say to have made some. attempt: the number of the round
    among those from its state. locked: the hash of the average that it repeats, with that one's shares; b"" where
    it makes one. claims: who says in its join that it has precommitted that.
    """

    name: RoundName
    me: PeerID
    members: Sequence[PeerID]
    reducers: Sequence[PeerID]
    shares: tuple[int, ...]
    stub_of: Callable[[PeerID], Any]
    traffic: torch.Tensor
    patience: float
    longest: float
    limits: Mapping[str, float]
    voices: Mapping[str, Fraction | int] = field(default_factory=dict)
    trainers: Mapping[str, Fraction | int] = field(default_factory=dict)
    swarm: Fraction | int = 0
    steps: frozenset[str] = frozenset()
    attempt: int = 1
    locked: bytes = b""
    claims: frozenset[str] = frozenset()

    def vote(self, peer: object, hashes: Sequence[bytes], kind: type[SignedVote] = SignedVote) -> SignedVote:
        """The vote, unsigned, of this member for the average whose parts have these hashes."""
        return kind(self.name, str(peer), self.attempt, self.shares, (average_hash(self.shares, hashes),))

    def cut(self, layout: Partition) -> tuple[TensorPart, ...]:
        """Its parts, each with who reduces it: nobody what was made before. Raises as `Partition.parts`."""
        parts = self.name.cut(layout, self.shares)
        return tuple(replace(part, reducer=NOBODY) for part in parts) if self.locked else parts

"""The members of a round, and how they find each other: at the peer that all of them take for the leader.

In hivemind whoever has waited longest leads, so two leaders can begin two rounds from one state. Here the members'
signed records say who should come, and the state, which nobody knows before, says which of them leads; the others go to
it directly. The leader hands out all signed joins, and decides nothing about them. They are a kilobyte each, so of a
large group it sends them to some of the members, and to the others the group's id: these ask those for the joins.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import (
    GROUP_BYTES,
    NotProven,
    Opened,
    RoundName,
    SignedJoin,
    SignedVote,
    average_hash,
    open_envelope,
)
from tt_cli.swarm.allreduce.votes import is_quorum, liars_among
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, NOBODY, Partition, TensorPart
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.records.peer_record import PeerRecord

POLL_SECONDS, ASKED_A_SECOND = 0.1, 200  # between two requests to the leader; by all members of a large group
SPOILED, TOO_FEW = "who spoiled a round", "trainers came"
KEPT_GROUPS = 2  # that others may still ask about
RELAYS, ASKED = 16, 3  # members of a group whom the leader tells all joins; of them, whom another one asks
SKEW = 3.0  # seconds between two clocks: hivemind's DHT takes no more
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
    liars: the largest number below a third of the trainers' voices. steps: members that say to have made some.
    attempt: the number of the round among those from its state. locked: the hash of the average that it repeats, with
    that one's shares; b"" where it makes one. claims: who says in its join that it has precommitted that.
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
    liars: int = 0
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


class FalseGroup(ValueError):
    """A group that no honest leader hands out: who leads it, and what is wrong with it."""

    def __init__(self, leader: str, words: str):
        super().__init__(f"{leader} led a group {words}")
        self.leader = leader


def entry_of(join: bytes, votes: Sequence[bytes] = ()) -> bytes:
    """Pack a member's word to its leader: its signed join, and the votes by which it is locked."""
    return wire.GATHERED.pack((None, 0, wire.SIGNED_JOIN.pack((join, tuple(votes)))))


def read_entry(gathered: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """Signed join and votes. Raises ValueError for anything else."""
    return wire.SIGNED_JOIN.read(wire.GATHERED.read(gathered)[2])


# a leader is asked ten times a second, and all look at all joins; the votes beside them are not remembered here
read_join = functools.lru_cache(maxsize=2 * MAX_MEMBERS)(SignedJoin.read)


def join_in(gathered: bytes, peer: PeerID, opened: Opened) -> SignedJoin:
    """The join that this member signed for a group. Raises ValueError for anything else."""
    signer, join = read_join(read_entry(gathered)[0], opened)
    if signer != str(peer):
        raise NotProven("it was signed by somebody else")
    return join


def member_in(gathered: bytes, peer: PeerID, membership: Admission, opened: Opened = open_envelope) -> SignedJoin:
    """As `join_in`, of a member of the run. Raises NotAdmitted for anybody else."""
    join = join_in(gathered, peer, opened)
    try:
        membership.admit(join.pass_text, str(peer))
    except NotAdmitted as error:
        raise NotAdmitted(f"{peer} is no member: {error}") from None
    return join


def joins_of(
    group: GroupInfo, own: bytes, me: PeerID, membership: Admission, opened: Opened, patience: float
) -> dict[PeerID, SignedJoin]:
    """The joins of a group's members. own: what this peer gave to the leader. patience: seconds for which one seeks.

    Raises FalseGroup where an entry is missing, is there twice, was changed or belongs to another group, NotAdmitted
    for a group with who is no member of the run.
    """
    entries = dict(zip(group.peer_ids, group.gathered, strict=False))
    mine, joins = join_in(own, me, opened), dict[PeerID, SignedJoin]()

    def refused(words: str) -> FalseGroup:
        return FalseGroup(mine.leader, words)

    if not len(entries) == len(group.peer_ids) == len(group.gathered):
        raise refused("of other members than joins")
    if mine.leader != str(me) and entries.get(me) != entry_of(read_entry(own)[0]):  # votes stand with the leader's
        raise refused("without what this peer signed")
    for peer, gathered in entries.items():
        try:
            joins[peer] = member_in(gathered, peer, membership, opened)
        except ValueError as error:
            raise refused(f"in which {peer} joined with nonsense ({error})") from error
        # this peer and its leader each had that much patience, and the leader's clock may differ from either's
        if joins[peer].group != mine.group or abs(joins[peer].time - mine.time) > 3 * (patience + SKEW):
            raise refused(f"with what {peer} signed for another one")
    if mine.leader not in map(str, joins):
        raise refused("without itself")
    return joins


def group_id_of(gathered: Sequence[bytes]) -> bytes:
    """A group's id (32,): the hash of all of its members' joins, in whatever order they come."""
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(entry).digest() for entry in gathered))).digest()


def roster_bytes(join: int, members: int) -> int:
    """Bytes that a leader sends to a group of so many members, whose joins have so many each."""
    return members * (min(members, RELAYS) * join + GROUP_BYTES)


class LeaderRendezvous(GroupKeyManager):
    """Sends this peer to the leader instead of to whomever the DHT names.

    seeker: what looks for a group now. handed_out: what members are told of each. fetched: the group of which the
    leader told the id. formed: ids of the newest groups of this peer, each with what looked for it, and with
    all entries.
    """

    relays = RELAYS

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        seeker: Callable[[], StepControl],
        handed_out: Callable[[GroupInfo], Sequence[bytes]] = lambda group: group.gathered,
        fetched: Callable[[GroupInfo], Awaitable[Mapping[PeerID, bytes]]] | None = None,
    ):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.plan = RoundPlan()
        self.formed: list[tuple[bytes, StepControl, GroupInfo]] = []
        self._seeker, self._handed_out, self._fetched = seeker, handed_out, fetched
        self._asked, self._forming = -math.inf, asyncio.Condition()
        self._relayed: tuple[bytes, list[PeerID], bytes] = b"", [], b""

    @property
    def current_key(self) -> str:
        return f"{self.prefix}_{self.plan.state_key}.0b"

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """The leader, unless this peer is it; hivemind asks in a busy loop and is held to the pace of the plan."""
        pace = max(POLL_SECONDS, len(self.plan.members) / ASKED_A_SECOND)
        await asyncio.sleep(max(0.0, self._asked + pace - loop_time()))
        self._asked = loop_time()
        if self.plan.leader in ("", str(self.peer_id)):
            return []
        return [(PeerID.from_base58(self.plan.leader), get_dht_time() + 2 * pace)]

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Nobody looks for this peer on the DHT."""
        return True

    def check(
        self, group: GroupInfo, swarm: Fraction | int, membership: Admission, opened: Opened, patience: float
    ) -> dict[PeerID, SignedJoin]:
        """The members' joins. Raises as `joins_of` and `RoundPlan.check`, and ValueError for a group that was given up.

        swarm: voices that there are now: the plan was made when the group was first sought. patience: see `joins_of`.
        """
        group_id = group_id_of(group.gathered)
        seeker = next(seeker for formed, seeker, _ in reversed(self.formed) if formed == group_id)
        joins = joins_of(group, seeker.data_for_gather, self.peer_id, membership, opened, patience)
        with_steps = sum(join.steps for peer, join in joins.items() if peer != self.peer_id)
        replace(self.plan, swarm=max(swarm, self.plan.swarm)).check(group, with_steps)
        if seeker.cancelled():
            raise ValueError("the group was given up")
        return joins

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """The key follows the state alone; the group is remembered, as hivemind's leader hands it out from here on."""
        if self._fetched is not None and {*map(len, group_info.gathered)} == {GROUP_BYTES}:
            entries = await self._fetched(group_info)
            object.__setattr__(group_info, "peer_ids", tuple(entries))
            object.__setattr__(group_info, "gathered", tuple(entries.values()))
        object.__setattr__(group_info, "gathered", tuple(self._handed_out(group_info)))
        group = group_id_of(group_info.gathered), self._seeker(), group_info
        async with self._forming:
            self.formed = [*self.formed[-KEPT_GROUPS:], group]
            self._forming.notify_all()

    async def entries(self, group_id: bytes, asker: PeerID, patience: float) -> tuple[bytes, ...]:
        """The entries of a group for another member, once it has formed. Raises TimeoutError and ValueError."""

        def formed() -> GroupInfo | None:
            return next((group for formed, _, group in self.formed if formed == group_id), None)

        async with asyncio.timeout(patience), self._forming:
            group = await self._forming.wait_for(formed)
        if group is None or asker not in group.peer_ids:
            raise ValueError("not a member of this group")
        return group.gathered

    def told(self, message: averaging_pb2.MessageFromLeader, peer: PeerID, opened: Opened) -> None:
        """Leave it to relays to tell a member the joins of the group of this message: it has the group's id instead.

        And the ids of the relays, those of the fastest lines, as they say, who accept connections, for each member in
        another order; the leader's; its own.
        """
        if len(message.gathered) <= self.relays + 1:
            return
        if message.group_id != self._relayed[0]:
            members = list(map(PeerID, message.ordered_peer_ids))
            joins = {
                member: join_in(entry, member, opened) for member, entry in zip(members, message.gathered, strict=True)
            }
            listening = [member for member, join in joins.items() if join.listens and member != self.peer_id]
            relays = sorted(listening, key=lambda member: -joins[member].upload)[: self.relays]
            self._relayed = message.group_id, relays, group_id_of(message.gathered)
        _, relays, group_id = self._relayed
        if relays and peer not in relays:
            first = list(message.ordered_peer_ids).index(peer.to_bytes()) % len(relays)
            told = [*relays[first:], *relays[:first], self.peer_id, peer]
            del message.ordered_peer_ids[:], message.gathered[:]
            message.ordered_peer_ids.extend(member.to_bytes() for member in told)
            message.gathered.extend([group_id] * len(told))

    def relays_of(self, group: GroupInfo) -> list[PeerID]:
        """Those whom this member asks, one after the other; the leader at last."""
        leader = PeerID.from_base58(self.plan.leader)
        relays = list(itertools.takewhile(lambda member: member != leader, group.peer_ids))
        return [*relays[:ASKED], leader]

"""The meeting place of a round's members: the peer that all of them take for the leader.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time, get_logger

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import GROUP_BYTES, NotProven, Opened, SignedJoin, open_envelope
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS
from tt_cli.swarm.membership.admission import Admission, NotAdmitted

logger = get_logger(__name__)

POLL_SECONDS, ASKED_A_SECOND = 0.1, 200  # between two requests to the leader; by all members of a large group
KEPT_GROUPS = 2  # that others may still ask about
RELAYS, ASKED = 16, 3  # members of a group whom the leader tells all joins; of them, whom another one asks
SOON = 0.125  # times the patience: then the next one is asked, too
SKEW = 3.0  # seconds between two clocks: hivemind's DHT takes no more


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

    seeker: what looks for a group now. handed_out: what members are told of each. stub_of: peer id → hivemind stub.
    patience: seconds for an answer. formed: ids of the newest groups of this peer, each with what looked for it, and
    with all entries.
    """

    relays = RELAYS

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        seeker: Callable[[], StepControl],
        handed_out: Callable[[GroupInfo], Sequence[bytes]],
        stub_of: Callable[[PeerID], Any],
        opened: Opened,
        patience: float,
    ):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.plan = RoundPlan()
        self.formed: list[tuple[bytes, StepControl, GroupInfo]] = []
        self._seeker, self._handed_out, self._stub_of = seeker, handed_out, stub_of
        self._opened, self._patience = opened, patience
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
        self, group: GroupInfo, swarm: Fraction | int, membership: Admission, seeking: float
    ) -> dict[PeerID, SignedJoin]:
        """The members' joins. Raises as `joins_of` and `RoundPlan.check`, and ValueError for a group that was given up.

        swarm: voices that there are now: the plan was made when the group was first sought. seeking: seconds for which
        one seeks.
        """
        group_id = group_id_of(group.gathered)
        seeker = next(seeker for formed, seeker, _ in reversed(self.formed) if formed == group_id)
        joins = joins_of(group, seeker.data_for_gather, self.peer_id, membership, self._opened, seeking)
        with_steps = sum(join.steps for peer, join in joins.items() if peer != self.peer_id)
        replace(self.plan, swarm=max(swarm, self.plan.swarm)).check(group, with_steps)
        if seeker.cancelled():
            raise ValueError("the group was given up")
        return joins

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """The key follows the state alone; the group is remembered, as hivemind's leader hands it out from here on."""
        if {*map(len, group_info.gathered)} == {GROUP_BYTES}:
            entries = await self._fetched(group_info)
            object.__setattr__(group_info, "peer_ids", tuple(entries))
            object.__setattr__(group_info, "gathered", tuple(entries.values()))
        object.__setattr__(group_info, "gathered", tuple(self._handed_out(group_info)))
        group = group_id_of(group_info.gathered), self._seeker(), group_info
        async with self._forming:
            self.formed = [*self.formed[-KEPT_GROUPS:], group]
            self._forming.notify_all()

    async def _fetched(self, group: GroupInfo) -> Mapping[PeerID, bytes]:
        """The entries of a group of which the leader told the id, from others of its members: all have them soon."""
        (group_id, *_), leader = group.gathered, PeerID.from_base58(self.plan.leader)

        async def ask(member: PeerID) -> dict[PeerID, bytes]:
            try:
                request = wire.ROSTER_REQUEST.message((group_id,))
                answer = await self._stub_of(member).rpc_roster(request, timeout=self._patience)
                (entries,) = wire.ROSTER.read(answer)
                if group_id_of(entries) != group_id:
                    raise ValueError("joins of another group")
                return {
                    PeerID.from_base58(read_join(read_entry(entry)[0], self._opened)[0]): entry for entry in entries
                }
            except Exception as error:  # the next one is asked
                logger.info(f"{member} did not tell who is in the group: {error!r}")
                return {}

        relays = itertools.takewhile(lambda member: member != leader, group.peer_ids)
        members, asked = [*itertools.islice(relays, ASKED), leader], set[asyncio.Task[dict[PeerID, bytes]]]()
        try:
            while members or asked:
                asked |= {asyncio.create_task(ask(member)) for member in members[:1]}
                members, soon = members[1:], SOON * self._patience if members[1:] else None
                done, asked = await asyncio.wait(asked, timeout=soon, return_when=asyncio.FIRST_COMPLETED)
                if entries := next(filter(None, (task.result() for task in done)), None):
                    return entries
        finally:
            for task in asked:
                task.cancel()
        raise MatchmakingException("nobody told who is in the group")

    async def entries(self, group_id: bytes, asker: PeerID) -> tuple[bytes, ...]:
        """The entries of a group for another member, once it has formed. Raises TimeoutError and ValueError."""

        def formed() -> GroupInfo | None:
            return next((group for formed, _, group in self.formed if formed == group_id), None)

        async with asyncio.timeout(self._patience), self._forming:
            group = await self._forming.wait_for(formed)
        if group is None or asker not in group.peer_ids:
            raise ValueError("not a member of this group")
        return group.gathered

    def told(self, message: averaging_pb2.MessageFromLeader, peer: PeerID) -> None:
        """Leave it to relays to tell a member the joins of the group of this message: it has the group's id instead.

        And the ids of the relays, those of the fastest lines, as they say, who accept connections, for each member in
        another order; the leader's; its own.
        """
        if len(message.gathered) <= self.relays + 1:
            return
        if message.group_id != self._relayed[0]:
            members = list(map(PeerID, message.ordered_peer_ids))
            entries = zip(members, message.gathered, strict=True)
            joins = {member: join_in(entry, member, self._opened) for member, entry in entries}
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

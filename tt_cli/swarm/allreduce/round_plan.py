"""The members of a round, and how they find each other: at the peer that all of them take for the leader.

In hivemind whoever has waited longest leads, so two leaders can begin two rounds from one state. Here the members'
signed records say who should come, and the smallest peer id leads; the others go to it directly.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import RoundName
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.records.peer_record import PeerRecord

POLL_SECONDS = 0.1
SPOILED, TOO_FEW = "who spoiled a round", "trainers came"
KEPT_GROUPS = 2  # that others may still ask about
SPARE = 2.0  # times the samples that a member may claim: records are a few seconds old, and speeds are means


@dataclass(frozen=True)
class RoundPlan:
    """The members that should average together, and where they meet. Plans of the same members and step are equal.

    state_key: names the state from which the round starts. members: peer ids, this peer included. leader: the one that
    the others go to; "" when none of them accepts connections. swarm: trainers that there are, whatever they hold.
    avoided: peers with which no group is formed. welcome: those that a leader takes in, None for all. allowed: peer id
    → samples that it may claim.
    """

    state_key: str = ""
    members: frozenset[str] = frozenset()
    leader: str = ""
    swarm: int = 2
    avoided: frozenset[str] = field(default=frozenset(), compare=False)
    welcome: frozenset[str] | None = field(default=None, compare=False)
    allowed: Mapping[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, state_key: str, records: Sequence[PeerRecord], swarm: int, now: float) -> RoundPlan:
        """A round of the peers of these records; the smallest peer id that accepts connections leads. now: DHT time."""
        members = frozenset(record.peer_id for record in records)
        leader = min((record.peer_id for record in records if not record.client_mode), default="")
        allowed = claim_limits(records, now)
        return cls(state_key, members, leader, max(swarm, len(members)), allowed=allowed)

    @property
    def enough(self) -> bool:
        """More than half of the trainers: no others can make the same step."""
        return 2 * len(self.members) > self.swarm

    @property
    def lacking(self) -> str:
        """Words about whom the members need for a step; "" when they are enough."""
        if not self.enough:
            return f"for more than {len(self.members)} of {self.swarm} trainers"
        return "" if self.leader else "in client mode, for a trainer that accepts connections"

    def takes(self, peer_id: str) -> bool:
        """True if a leader lets it into the group."""
        return peer_id not in self.avoided and (self.welcome is None or peer_id in self.welcome)

    def check(self, group: GroupInfo) -> None:
        """Raise ValueError for a group in which no round may begin.

        Two groups that both hold more than half of the trainers cannot be: a state has one successor.
        """
        if spoilers := self.avoided.intersection(map(str, group.peer_ids)):
            raise ValueError(f"the group includes {', '.join(sorted(spoilers))}, {SPOILED}")
        if len(group.peer_ids) > MAX_MEMBERS:
            raise ValueError(f"a group with {len(group.peer_ids)} members: up to {MAX_MEMBERS} there may be")
        if 2 * len(group.peer_ids) <= self.swarm:
            raise ValueError(f"only {len(group.peer_ids)} of {self.swarm} {TOO_FEW}")


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
    swarm: int = 0


@dataclass(frozen=True)
class RoundGroup:
    """The members of a round that has begun, and how one of them reaches the others.

    members: in the order of their ids' bytes. reducers: those of them that accept connections, in the same order.
    stub_of: peer id → hivemind stub. traffic: int64 (2,), bytes sent and received, counted up. patience: seconds to
    wait for a sender's next part. longest: seconds for the whole round. limits: peer id → samples that it may claim, of
    all members in their order.
    """

    name: RoundName
    me: PeerID
    members: Sequence[PeerID]
    reducers: Sequence[PeerID]
    stub_of: Callable[[PeerID], Any]
    traffic: torch.Tensor
    patience: float
    longest: float
    limits: Mapping[str, float]


def member_in(gathered: bytes, peer: PeerID, membership: Admission) -> AveragingMode:
    """The mode of a member of a group, by what it told the leader: its bandwidth, its mode and its pass.

    Raises ValueError for anything else, NotAdmitted for who is no member of the run.
    """
    _, mode, shown = wire.GATHERED.read(gathered)
    pass_text, averaging_mode = wire.SHOWN_PASS.read(shown), AveragingMode(mode)
    try:
        membership.admit(pass_text, str(peer))
    except NotAdmitted as error:
        raise NotAdmitted(f"{peer} is no member: {error}") from None
    return averaging_mode


class LeaderRendezvous(GroupKeyManager):
    """Sends this peer to the leader instead of to whomever the DHT names.

    seeker: what looks for a group now. formed: the newest groups that this peer was in, each with what looked for it.
    """

    def __init__(self, dht: DHT, prefix: str, seeker: Callable[[], StepControl | None]):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.plan = RoundPlan()
        self.formed: list[tuple[bytes, StepControl | None]] = []
        self._seeker = seeker
        self._asked = -math.inf

    @property
    def current_key(self) -> str:
        return f"{self.prefix}_{self.plan.state_key}.0b"

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """The leader, unless this peer is it; hivemind asks in a busy loop and is held to one look per POLL_SECONDS."""
        await asyncio.sleep(max(0.0, self._asked + POLL_SECONDS - time.monotonic()))
        self._asked = time.monotonic()
        if self.plan.leader in ("", str(self.peer_id)):
            return []
        return [(PeerID.from_base58(self.plan.leader), get_dht_time() + 2 * POLL_SECONDS)]

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Nobody looks for this peer on the DHT."""
        return True

    def check(self, group: GroupInfo, swarm: int) -> None:
        """Raise ValueError as `RoundPlan.check`, and for a group whose seeker was cancelled when it had just formed.

        swarm: trainers that there are now: the plan was made when the group was first sought.
        """
        replace(self.plan, swarm=max(swarm, self.plan.swarm)).check(group)
        if any(seeker is not None and seeker.cancelled() for formed, seeker in self.formed if formed == group.group_id):
            raise ValueError("the group was given up")

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """The key follows the state alone; the group is remembered."""
        self.formed = [*self.formed[-KEPT_GROUPS:], (group_info.group_id, self._seeker())]

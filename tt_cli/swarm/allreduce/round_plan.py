"""How the members of a round find each other: at the peer that all of them take for the leader.

hivemind lets peers that look for a group find each other through the DHT, and whoever has waited longest leads. Two
leaders can then begin two rounds from one state. Here the members' signed records say who should come, and the one
with the smallest peer id leads; the others go to it directly. Joining and the group's beginning are hivemind's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgpack
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tt_cli.identity.passes import MAX_PASS
from tt_cli.swarm.allreduce.claim_allowances import allowances
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.records.peer_record import PeerRecord

POLL_SECONDS = 0.1
MAX_GATHERED = MAX_PASS + 256  # bytes that a member tells about itself
KEPT_GROUPS = 2  # that others may still ask about


@dataclass(frozen=True)
class Participants:
    """Who should average together. leader: where they meet; "" when nobody of them accepts connections.

    swarm: how many trainers there are, with those that hold another state or did not come the last time. allowed: peer
    id → samples that it may claim. welcome: trainers whose records name no later state.
    """

    peer_ids: frozenset[str]
    leader: str
    swarm: int
    allowed: Mapping[str, float] = field(default_factory=dict, compare=False, hash=False)
    welcome: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, records: Iterable[PeerRecord], swarm: int = 0, welcome: Iterable[str] = ()) -> Participants:
        """The trainers of these records; the smallest peer id that accepts connections leads."""
        records = list(records)
        listening = [record.peer_id for record in records if not record.client_mode]
        everybody, leader = frozenset(record.peer_id for record in records), min(listening, default="")
        return cls(everybody, leader, swarm, allowances(records, get_dht_time()), frozenset(welcome))

    def __len__(self) -> int:
        return len(self.peer_ids)

    @property
    def enough(self) -> bool:
        """More than half of the trainers: no others can make the same step."""
        return 2 * len(self) > self.swarm

    @property
    def lacking(self) -> str:
        """Words about whom they need for a step; "" when they are enough."""
        if not self.enough:
            return f"for more than {len(self)} of {self.swarm} trainers"
        return "" if self.leader else "in client mode, for a trainer that accepts connections"


@dataclass(frozen=True)
class RoundPlan:
    """state_key: epoch and digest from which the round starts. expected: members that should come. leader: a peer id.

    swarm: trainers that there are, whatever they hold. avoided: peer ids with which no group is formed. welcome: those
    that a leader takes in, None for all: whose records say that they may start from this state.
    """

    state_key: str = ""
    expected: int = 2
    leader: str = ""
    swarm: int = 2
    avoided: frozenset[str] = frozenset()
    welcome: frozenset[str] | None = None

    def takes(self, peer_id: str) -> bool:
        """Whether a leader lets it into the group."""
        return peer_id not in self.avoided and (self.welcome is None or peer_id in self.welcome)

    def check(self, group: GroupInfo) -> None:
        """Raise ValueError for a group in which no round may begin.

        Two groups that both hold more than half of the trainers cannot be: a state has one successor.
        """
        if spoilers := self.avoided.intersection(map(str, group.peer_ids)):
            raise ValueError(f"the group includes {', '.join(sorted(spoilers))}, who spoiled a round")
        if 2 * len(group.peer_ids) <= self.swarm:
            raise ValueError(f"only {len(group.peer_ids)} of {self.swarm} trainers came")


def member_in(gathered: bytes, peer: PeerID, membership: Admission) -> AveragingMode:
    """How a member of a group takes part, by what it told the leader: its bandwidth, its mode and its pass.

    Raises ValueError for anything else, NotAdmitted for who is no member of the run.
    """
    if len(gathered) > MAX_GATHERED:
        raise ValueError("a member that says too much")
    try:
        _, mode, told = msgpack.unpackb(gathered, max_ext_len=0)
        pass_text = msgpack.unpackb(told, max_ext_len=0)
        if not isinstance(pass_text, str):
            raise ValueError("no pass")
        found = AveragingMode(mode)
    except Exception as error:  # msgpack raises many types
        raise ValueError(f"a member that says something else than it should: {error}") from error
    try:
        membership.admit(pass_text, str(peer))
    except NotAdmitted as error:
        raise NotAdmitted(f"{peer} is no member: {error}") from None
    return found


class LeaderRendezvous(GroupKeyManager):
    """Sends this peer to the leader instead of to whomever the DHT names.

    seeker: what looks for a group now. formed: the newest groups that this peer was in, each with what looked for it.
    """

    def __init__(self, dht: DHT, prefix: str, seeker: Callable[[], StepControl | None]):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.meeting = RoundPlan()
        self.formed: list[tuple[bytes, StepControl | None]] = []
        self._seeker = seeker
        self._asked = -float("inf")

    @property
    def current_key(self) -> str:
        return f"{self.prefix}_{self.meeting.state_key}.0b"

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """The leader, unless this peer is it; hivemind asks in a busy loop and is held to one look per POLL_SECONDS."""
        await asyncio.sleep(max(0.0, self._asked + POLL_SECONDS - time.monotonic()))
        self._asked = time.monotonic()
        if self.meeting.leader in ("", str(self.peer_id)):
            return []
        return [(PeerID.from_base58(self.meeting.leader), get_dht_time() + 2 * POLL_SECONDS)]

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Nobody looks for this peer on the DHT."""
        return True

    def check(self, group: GroupInfo) -> None:
        """As Meeting.check; raises ValueError too for a group whose seeker was cancelled when it had just formed."""
        self.meeting.check(group)
        if any(seeker is not None and seeker.cancelled() for formed, seeker in self.formed if formed == group.group_id):
            raise ValueError("the group was given up")

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """The key follows the state alone; the group is remembered."""
        self.formed = [*self.formed[-KEPT_GROUPS:], (group_info.group_id, self._seeker())]

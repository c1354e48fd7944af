"""How a member conducts itself inside one averaging round. Faults and attacks change what passes here.

They stand where messages leave and arrive: whatever the others' defences look at, they see it as it comes from another
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import Opening, SignedJoin
from tt_cli.swarm.allreduce.rendezvous import LeaderRendezvous
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.audit import audits
from tt_cli.swarm.averager import Averager

Message: TypeAlias = averaging_pb2.AveragingData
Messages: TypeAlias = AsyncIterator[Message]


class Conduct:
    """An honest member's. Each method gets what such a one does, and does it."""

    def leads(self, group: GroupInfo, me: PeerID) -> tuple[bytes, ...]:
        """The members' joins, as it hands them out and goes by them itself."""
        return group.gathered

    def sends(self, allreduce: AllReduce, indexes: Sequence[int], messages: Messages) -> Messages:
        """Its parts, on their way to a reducer."""
        return messages

    async def opens(self, allreduce: AllReduce, reducer: PeerID, opening: Opening) -> Opening:
        """What it signs of what it sends."""
        return opening

    def reduces(self, allreduce: AllReduce, place: int, encoded: bytes) -> bytes:
        """The average of one of its own parts."""
        return encoded

    def answers(self, allreduce: AllReduce, peer: PeerID, messages: Messages) -> Messages:
        """Averages, on their way to a sender."""
        return messages

    def shows(self, show: Callable[[], bytes]) -> bytes:
        """To an audit, what it sent or reduced."""
        return show()

    async def asks(self, commit: CommitProtocol, ask: Callable[[], Awaitable[None]]) -> None:
        """Another member for its status."""
        await ask()

    async def is_asked(
        self, commit: CommitProtocol, answer: Callable[[], Awaitable[runtime_pb2.ExpertInfo]]
    ) -> runtime_pb2.ExpertInfo:
        """By another member for its own."""
        return await answer()

    async def confirms(self, commit: CommitProtocol, member: PeerID, ask: Callable[[], Awaitable[None]]) -> None:
        """Its precommit, and asks another member for that one's."""
        await ask()

    async def is_confirmed(self, answer: Callable[[], Awaitable[tuple[bytes, ...]]]) -> tuple[bytes, ...]:
        """By another member, which asks for its own precommit."""
        return await answer()


class ConductedAllReduce(AllReduce):
    """The first phase of a round."""

    conduct = Conduct()

    def repeated(self, *args: Any) -> AllReduce:
        again = super().repeated(*args)
        again.conduct = self.conduct  # type: ignore[attr-defined]
        return again

    def _outgoing(self, indexes: Sequence[int]) -> Messages:
        return self.conduct.sends(self, indexes, super()._outgoing(indexes))

    async def _opening(self, reducer: PeerID) -> Opening:
        return await self.conduct.opens(self, reducer, await super()._opening(reducer))

    def _put_own(self, place: int, encoded: bytes) -> None:
        super()._put_own(place, self.conduct.reduces(self, place, encoded))

    def show(self, asker: str, reducer: str, index: int | None) -> bytes:
        return self.conduct.shows(partial(super().show, asker, reducer, index))

    def rpc_aggregate_part(self, stream: Messages, context: Any) -> Messages:
        return self.conduct.answers(self, context.remote_id, super().rpc_aggregate_part(stream, context))


class ConductedCommit(CommitProtocol):
    """The second one."""

    conduct = Conduct()

    async def _ask(self, member: PeerID) -> None:
        await self.conduct.asks(self, partial(super()._ask, member))

    async def answer(self, peer: PeerID, request: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
        return await self.conduct.is_asked(self, partial(super().answer, peer, request))

    async def _ask_precommit(self, member: PeerID, signed: Sequence[bytes]) -> None:
        await self.conduct.confirms(self, member, partial(super()._ask_precommit, member, signed))

    async def precommit(self, peer: PeerID, signed: Sequence[bytes]) -> tuple[bytes, ...]:
        return await self.conduct.is_confirmed(partial(super().precommit, peer, signed))


class Silence(Exception):
    """Raised by a conduct that leaves an audit without any answer."""


class Audits(audits.Audits):
    """Of this name, for hivemind calls other peers by the name of the class."""

    async def rpc_audit(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        try:
            return await super().rpc_audit(request, context)
        except Silence:
            return await asyncio.get_running_loop().create_future()


class ConductedRendezvous(LeaderRendezvous):
    """Where groups form. conduct: as leader, from a step on its way. A group of three is large to it."""

    conduct: Callable[[int], Conduct]
    relays = 1

    def __init__(self, *given: Any):
        super().__init__(*given)
        handed_out = self._handed_out
        self._handed_out = lambda group: self._told(group, tuple(handed_out(group)))

    def _told(self, group: GroupInfo, gathered: tuple[bytes, ...]) -> Sequence[bytes]:
        if self.plan.leader != str(self.peer_id):
            return gathered
        return self.conduct(step_of(self.plan)).leads(replace(group, gathered=gathered), self.peer_id)

    def told(self, message: averaging_pb2.MessageFromLeader, peer: PeerID) -> None:
        if type(self.conduct(step_of(self.plan))) is Conduct:  # who lies tells all itself
            super().told(message, peer)


def step_of(plan: RoundPlan) -> int:
    """The step that its round makes."""
    return int(plan.state_key.split("_")[0]) + 1


class ConductedAverager(Averager):
    """Asks how to conduct itself in each round. Subclasses say so."""

    allreduce_type, commit_type = ConductedAllReduce, ConductedCommit
    rendezvous_type, audits_type = ConductedRendezvous, Audits

    def conduct(self, step: int) -> Conduct:
        """In the round towards this step. In the averager's process."""
        return Conduct()

    def leading(self, step: int) -> Conduct:
        """As leader of a group for this step."""
        return Conduct()

    def _keys(self) -> LeaderRendezvous:
        keys = super()._keys()
        assert isinstance(keys, ConductedRendezvous)
        keys.conduct = self.leading
        return keys

    def _begin(
        self, group_id: bytes, joins: Mapping[PeerID, SignedJoin], weight: float, shown: Sequence[bytes] = ()
    ) -> CommitProtocol:
        commit = super()._begin(group_id, joins, weight, shown)
        assert isinstance(commit, ConductedCommit) and isinstance(commit.allreduce, ConductedAllReduce)
        commit.conduct = commit.allreduce.conduct = self.conduct(step_of(self._plan))
        return commit

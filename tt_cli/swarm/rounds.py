"""The rounds of a peer, for the members that speak of them: a little early, while they run, or just after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Set

from hivemind.p2p import PeerID

from tt_cli.identity.rate_limit import Places
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import GROUP_BYTES
from tt_cli.swarm.allreduce.rendezvous import KEPT_GROUPS
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS

SETTLING = 4  # questions of one peer at once


class KeptRounds(dict[bytes, CommitProtocol]):
    """The newest rounds by group. patience: seconds for which a member that is early waits."""

    def __init__(self, patience: float):
        super().__init__()
        self._patience, self._sought = patience, 0  # groups that are sought now
        self._given_up: Set[bytes] = frozenset()  # groups that this peer was in and left before their round
        self._changed = asyncio.Condition()  # a round began, or will not
        self._places = Places(SETTLING, MAX_MEMBERS)

    def seek(self) -> None:
        """A group is sought from now on."""
        self._sought += 1

    async def sought(self, formed: Set[bytes], mine: Set[bytes]) -> None:
        """That is over. formed: the newest groups. mine: those that it found: given up where no round began."""
        self._sought -= 1
        self._given_up = self._given_up & formed | mine - self.keys()
        async with self._changed:
            self._changed.notify_all()

    async def begin(self, commit: CommitProtocol) -> None:
        """A round begins in a group that has formed."""
        async with self._changed:
            self[commit.allreduce.group_id] = commit
            for old in list(self)[:-KEPT_GROUPS]:
                del self[old]
            self._changed.notify_all()

    def leave(self, state_key: str) -> None:
        """Those from this state are over for this peer."""
        for commit in self.values():
            for phase in commit.phases if commit.allreduce.name.state_key == state_key else ():
                phase.left = True

    async def find(self, group_id: bytes) -> CommitProtocol | None:
        """The round, or the phase of one, that a member speaks of; waits while this peer may be about to begin it."""
        group = group_id[:GROUP_BYTES]

        def known() -> bool:
            return group in self or group in self._given_up or not self._sought

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._changed.wait_for(known)
        commit = self.get(group)
        return commit and await commit.phase(group_id)

    @contextlib.asynccontextmanager
    async def asked(self, group_id: bytes, caller: PeerID) -> AsyncIterator[CommitProtocol]:
        """The same for a question in settling. Raises Crowded, and ValueError where there is none."""
        with self._places.one(str(caller)):
            commit = await self.find(group_id)
            if commit is None:
                raise ValueError("no such round here")
            yield commit

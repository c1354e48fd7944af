"""Trusted digests: states that members signed, as of all looks at their records; others are not believed."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence

from tt_cli.swarm.records.consensus import SwarmState, enough, voices, voters_among
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.shared_state import Tree

LOOK_SECONDS = 2.0
SIGNATURE_PAUSES = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each look for a signature


class TrustedDigests:
    """They may step on while a state is taken, so what was signed is remembered.

    read: the newest record of each peer; it may block. own: the peer id that does not count. absent: see `SwarmState`.
    secret: by which the donors are in order; drawn where there is none.
    """

    def __init__(
        self, read: Callable[[], Sequence[PeerRecord]], own: str, absent: Sequence[PeerRecord] = (), secret: str = ""
    ):
        self._read, self._own, self._absent, self._secret = read, own, absent, secret or secrets.token_hex()
        self._lock = asyncio.Lock()
        self._holders: dict[tuple[int, str], dict[str, None]] = {}  # who can hand it over
        self._votes: dict[tuple[int, str], dict[str, PeerRecord]] = {}
        self._voters: list[PeerRecord] = []
        self._held: set[tuple[int, str]] = set()  # states that counted before anybody voted
        self.view = SwarmState.of(())

    def place_of(self, peer_id: str) -> float:
        """Below 1, in this taker's own order: nobody can make a key that comes first."""
        return random.Random(f"{self._secret} {peer_id}").random()

    async def look(self) -> None:
        """Read the records once more."""
        async with self._lock:
            read = await asyncio.to_thread(self._read)
        if not read:
            return  # the DHT did not answer: that says of nobody that it is gone
        records = [record for record in read if not record.left and record.peer_id != self._own]
        records.sort(key=lambda record: self.place_of(record.peer_id))
        self.view = SwarmState.of(records, self._absent)
        voters = voters_among(records, self.view.absent)
        for record in voters:
            self._votes.setdefault(record.state, {})[record.peer_id] = record
        self._voters = voters or self._voters  # where all have gone, who never voted decides nothing
        for step in {record.epoch for record in records if not self._voters}:
            view = SwarmState.of(record for record in records if record.epoch == step)
            if view.digest:
                self._held.add((view.epoch, view.digest))
        for record in records:
            if record.digest and not record.client_mode:
                self._holders.setdefault(record.state, {})[record.peer_id] = None

    def believed(self, tree: Tree) -> bool:
        """Tell whether this state was the swarm's in what was read so far."""
        state = tree.step, tree.digest
        if self._voters:
            return enough(sum(voices(self._votes.get(state, {}).values()).values()), self._voters)
        return state in self._held

    def signed_by(self, peer_id: str, tree: Tree) -> bool:
        """Tell whether a record of this peer, who accepts connections, named this state in what was read so far."""
        return peer_id in self._holders.get((tree.step, tree.digest), {})

    async def look_for(self, tree: Tree) -> bool:
        """True when most of those who held a state of this step signed this one.

        A donor may have stepped just before it answered: its record follows.
        """
        for pause in SIGNATURE_PAUSES:
            if self.believed(tree):
                break
            await asyncio.sleep(pause)
            await self.look()
        return self.believed(tree)

    async def keep_looking(self) -> None:
        """Remember what is signed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def donors(self, tree: Tree | None) -> list[str]:
        """Whom to ask: those who hold the state of `tree` or held it, then those who hold the foremost one."""
        held = self._holders.get((tree.step, tree.digest), {}) if tree is not None else {}
        foremost = dict.fromkeys(self.view.donors() if self.view.digest else [])
        return list(dict.fromkeys(donor for donor in foremost if donor in held) | held | foremost)

"""The organiser of a simulated run: passes, and notices with bans and orders, as files beside each member's key."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tt_cli.identity.passes import Notice, Pass, RollBack, sign
from tt_cli.run import RunConfig
from tt_cli.swarm.membership.admission import LOOK_SECONDS, Admission
from tt_cli.swarm.membership.orders import OrganiserOrders

if TYPE_CHECKING:
    from simulation.machine import Machine

AUTHORITY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@functools.lru_cache
def pass_of(peer_id: str, user: str, run: str) -> str:
    """What this peer shows in a closed run, for ever."""
    return sign(Pass(user, peer_id, run, 0.0, 1e11), AUTHORITY)


class Holder(Admission):
    """One process of a peer that has this pass. files: the peer's notices, which its processes look at now and then."""

    def __init__(self, run: RunConfig, shown: str, files: list[str]):
        super().__init__(run)
        self._shown, self._files, self._next_look = shown, files, 0.0

    def mine(self) -> str:
        return self._shown

    def hear(self, text: str) -> bool:
        if heard := super().hear(text):
            self._files.append(text)
        return heard

    def _look(self) -> None:
        if self._files and (now := asyncio.get_running_loop().time()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            for text in self._files:
                if text != self._text:
                    self._take(text)


class Orders(OrganiserOrders):
    """Those that one machine follows. Its disk keeps the era, and what it has of the states to go back to."""

    def __init__(self, membership: Admission, machine: Machine):
        super().__init__(membership, Path("/nonexistent"), machine.ways_back, machine.leave)
        self.era, self._machine = machine.era, machine

    def done(self, order: RollBack) -> None:
        self._leave(order)
        self.era = self._machine.era = order.order


class Defiance(Orders):
    """Of one that says it has gone back, and keeps the state that it has."""

    @property
    def due(self) -> None:
        if order := super().due:
            self.done(order)


class Organiser:
    """Signs one notice after the other."""

    def __init__(self, run: str):
        self._notice = Notice(run, 0, 0.0, frozenset(), frozenset(), "", None)

    @property
    def era(self) -> int:
        """That of its last order to go back; 0 before the first."""
        return 0 if self._notice.rollback is None else self._notice.rollback.order

    def say(self, hearing: Iterable[Machine], **changes: Any) -> None:
        """Change the notice. hearing: who has it from the authority; the others hear of it on the DHT."""
        self._notice = replace(self._notice, number=self._notice.number + 1, **changes)
        text = sign(self._notice, AUTHORITY)
        for machine in hearing:
            machine.notices.append(text)

    def take_back(self, hearing: Iterable[Machine], step: int, digest: str, source: str) -> None:
        """Order all to go back to this state."""
        self.say(hearing, rollback=RollBack(step, digest, source, self.era + 1))

    def ban(self, hearing: Iterable[Machine], peer_id: str) -> None:
        """Let this peer take part no more."""
        self.say(hearing, banned_peers=self._notice.banned_peers | {peer_id})

"""Groups of the four members of rounds.py, as their leader hands them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from swarm.rounds import NAME, PEERS, SIGNERS

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import SignedJoin, open_envelope
from tt_cli.swarm.allreduce.rendezvous import LeaderRendezvous

NOW = 1000.0  # DHT time at which all of them join


def join_of(**changes: Any) -> SignedJoin:
    """What a member signs for the group that the first one leads, except for `changes`."""
    usual = {"run": NAME.run, "state_key": NAME.state_key, "leader": str(PEERS[0]), "time": NOW}
    return SignedJoin(**usual | {"listens": True, "upload": 0, "steps": True, "pass_text": ""} | changes)


def packed(envelope: bytes, mode: int = 0) -> bytes:
    """An entry, with this in the place of hivemind's mode."""
    return wire.GATHERED.pack((None, mode, wire.SIGNED_JOIN.pack((envelope, ()))))


def entry_of(number: int, **changes: Any) -> bytes:
    """A member's entry. RSA's signatures differ each time."""
    return packed(join_of(**changes).sign(SIGNERS[number]))


def group_of(*numbers: int, **entries: bytes) -> GroupInfo:
    """A group of these members. entries: others than they signed, of "m0" to "m3"."""
    gathered = tuple(entries.get(f"m{number}") or ENTRIES[number] for number in numbers)
    return GroupInfo(b"hivemind's, which counts nowhere", tuple(PEERS[number] for number in numbers), gathered)


def rendezvous(control: StepControl | None = None) -> LeaderRendezvous:
    """The first member's, which asks nobody for joins. control: what looks for a group."""

    def nobody(peer: object) -> Any:
        raise AssertionError(peer)

    def seeker() -> Any:
        return control

    me: Any = SimpleNamespace(peer_id=PEERS[0])
    return LeaderRendezvous(me, "run", seeker, lambda group: group.gathered, nobody, open_envelope, 1.0)


ENTRIES = [entry_of(number) for number in range(4)]

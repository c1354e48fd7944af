"""What a member does wrong outside of rounds: in its gradient, its record, or the state that it hands out.

In `scripts/bench attacks` it is a real peer until the step FIRST_STEP: the others have trained with it before it turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator

from testbed.attacks.gradients import GRADIENTS, poison
from testbed.attacks.records import RECORDS, false_bytes, false_state
from testbed.attacks.rounds import ROUNDS
from tt_cli.run import RunConfig
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network.dht_node import addresses_of, start_dht
from tt_cli.swarm.records.peer_record import PeerRecord, peers_key
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import LockedState

FIRST_STEP = 3
FALSE_DONOR, ANOTHERS, COPIED = "false donor", "another's peer id", "copied message"
PHANTOM, PHANTOMS = "phantom trainers", 4  # of each attacker
MEMBERS = tuple(dict.fromkeys([*ROUNDS, *GRADIENTS, COPIED, *RECORDS, PHANTOM, FALSE_DONOR]))


def attacking(honest: type[Collaboration], attacks: Mapping[str, int], number: int) -> type[Collaboration]:
    """A collaboration that does these wrong, each from a step on. number: which of the attackers it is."""
    for attack, first in attacks.items():
        if attack in GRADIENTS:
            honest = _with_gradients(honest, attack, first, number)
        elif attack in RECORDS:
            honest = _with_records(honest, attack, first)
        elif attack == PHANTOM:
            honest = _with_phantoms(honest, first)
        elif attack == FALSE_DONOR:
            honest = _with_state(honest, first, number)
        elif attack not in (*ROUNDS, COPIED):
            raise ValueError(f"no attack of a member is called {attack!r}")
    return honest


def speaking_for(honest: type[Collaboration], victim: str) -> type[Collaboration]:
    """One that publishes its records in the name of another peer."""

    class Directory(honest.directory_type):  # type: ignore[misc, name-defined]
        def _send(self, record: PeerRecord) -> Any:
            return super()._send(record.model_copy(update={"peer_id": victim}))

    return type("Speaking", (honest,), {"directory_type": Directory})


def _with_gradients(honest: type[Collaboration], attack: str, first: int, number: int) -> type[Collaboration]:
    class Poisoning(honest):  # type: ignore[misc, valid-type]
        """When a gradient is put into a round: once for each."""

        def _hold(self) -> None:
            super()._hold()
            if self.epoch + 1 >= first:
                poison(self.averager.local, attack, number, self.epoch + 1)

    return Poisoning


def _with_records(honest: type[Collaboration], attack: str, first: int) -> type[Collaboration]:
    class Directory(honest.directory_type):  # type: ignore[misc, name-defined]
        """Lies on the way to the DHT; the peer itself goes on with the truth."""

        published = 0

        def _send(self, record: PeerRecord) -> Any:
            self.published += 1
            lie = {**RECORDS[attack](record, self.published), "vote": True} if record.epoch + 1 >= first else {}
            return super()._send(record.model_copy(update=lie))

    return type("Lying", (honest,), {"directory_type": Directory})


def _with_phantoms(honest: type[Collaboration], first: int) -> type[Collaboration]:
    class Directory(honest.directory_type):  # type: ignore[misc, name-defined]
        """Writes what it says of itself for trainers that do not exist, too: each a DHT node with its own key."""

        def __init__(self, run: RunConfig, dht: DHT, *more: Any):
            super().__init__(run, dht, *more)
            self._run, self._nodes = run, list[tuple[Identity, DHT]]()
            for _ in range(PHANTOMS):
                identity = claim_identity(Path(tempfile.mkdtemp()), "trainer")
                self._nodes.append((identity, start_dht(run, identity, initial_peers=addresses_of(dht))))

        def _send(self, record: PeerRecord) -> Any:
            lasts = record.time + self._run.swarm.statistics_expiration
            for identity, node in self._nodes if record.epoch + 1 >= first else ():
                told = record.model_copy(update={"peer_id": identity.peer_id, "vote": True}).model_dump()
                owner = RSASignatureValidator(identity.key).local_public_key
                node.store(peers_key(self._run.identity), told, lasts, subkey=owner, return_future=True)
            return super()._send(record)

    return type("Inventing", (honest,), {"directory_type": Directory})


def _with_state(honest: type[Collaboration], first: int, number: int) -> type[Collaboration]:
    """Hands out other bytes than the signed ones; or a state of its own, which it says is ahead of everybody's."""
    ahead, held = bool(number % 2), list[LockedState]()

    class State(honest.state_type):  # type: ignore[misc, name-defined]
        def __init__(self, shared: Any):
            super().__init__(shared)
            held.append(self)

        def snapshot(self) -> tuple[bytes, StateBuffer]:
            buffer = StateBuffer.new()
            with self._lock:
                tree = (false_state if ahead else false_bytes)(self._shared, buffer)
            return tree.manifest(), buffer

    class Directory(honest.directory_type):  # type: ignore[misc, name-defined]
        def _send(self, record: PeerRecord) -> Any:
            if ahead and held and record.epoch + 1 >= first:
                buffer = StateBuffer.new()
                with held[0]._lock:
                    tree = false_state(held[0]._shared, buffer)
                buffer.close()
                record = record.model_copy(update={"epoch": tree.step, "digest": tree.digest, "vote": True})
            return super()._send(record)

    return type("FalseDonor", (honest,), {"state_type": State, "directory_type": Directory})

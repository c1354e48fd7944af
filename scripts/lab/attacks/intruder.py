"""A training peer of a closed run whose pass should not count, and who tries everything that a member does.

Its folder holds the pass that the experiment gave it (scripts/lab/passes.py). It does not look at it itself: the others
have to. Options: those of `scripts.lab.lockstep_trainer`, and `attack`.
"""

from __future__ import annotations

from typing import Any

from scripts.lab import lockstep_trainer
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory

REPLAYED, FORGED, EXPIRED, ANOTHERS, BANNED = (
    "replayed pass",
    "forged pass",
    "expired pass",
    "another's peer id",
    "banned peer",
)
INTRUDERS = (REPLAYED, FORGED, EXPIRED, ANOTHERS, BANNED)


def believe_own_pass() -> None:
    """Whatever it is."""
    from tt_cli.swarm.network import dht_node

    dht_node.check_own_pass = lambda *_: None  # type: ignore[assignment, attr-defined]


def speak_for(victim: str) -> None:
    """Publish records in the name of another peer."""
    honest = PeerDirectory._send

    def send(board: PeerDirectory, record: PeerRecord) -> Any:
        return honest(board, record.model_copy(update={"peer_id": victim}))

    PeerDirectory._send = send  # type: ignore[method-assign]


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As a training peer's."""
    if options.pop("attack") == ANOTHERS:
        speak_for(options.pop("victim"))
    believe_own_pass()
    lockstep_trainer.main(options, emit, orders)

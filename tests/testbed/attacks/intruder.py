"""A training peer of a closed run whose pass should not count, and who tries everything that a member does.

Its folder holds the pass that the experiment gave it (tests/testbed/passes.py). It does not look at it itself:
the others have to. Options: those of `testbed.peer`, and `victim`, the peer in whose name it publishes its records.
"""

from __future__ import annotations

from typing import Any

from testbed import peer
from testbed.attacks.member import ANOTHERS
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.network import dht_node

REPLAYED, FORGED, EXPIRED, BANNED = "replayed pass", "forged pass", "expired pass", "banned peer"
INTRUDERS = (REPLAYED, FORGED, EXPIRED, ANOTHERS, BANNED)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As a training peer's, which believes its own pass, whatever it is."""
    dht_node.check_own_pass = lambda *_: None  # type: ignore[assignment, attr-defined]
    peer.main(options, emit, orders)

"""An auxiliary peer whose DHT node takes records of many owners from one node: for scripts/bench records."""

from __future__ import annotations

from functools import partial
from typing import Any

from testbed.record_node import AnyOwner
from tt_cli.auxiliary import coordinator
from tt_cli.supervisor.events import Emit
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.network.dht_node import start_dht


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """As `tt_cli.auxiliary.coordinator`."""
    coordinator.main(options, emit, orders, partial(start_dht, authorizer=AnyOwner))

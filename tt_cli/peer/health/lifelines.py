"""Parts that a peer cannot do without, and nobody starts anew beneath it: its daemon, its averager, its addresses."""

from __future__ import annotations

from tt_cli.supervisor.processes import alive
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.network.addresses import moved
from tt_cli.swarm.network.dht_node import daemon_pid


class Lifelines:
    """Lifelines of one peer, all whole when this is made."""

    def __init__(self, averager: Averager):
        self._averager, self._daemon = averager, daemon_pid(averager.dht)

    def check(self) -> None:
        """Without one of them a peer would go on for nobody. Raises WorkerBroken, so that it is started again."""
        if self._daemon is not None and not alive(self._daemon):
            raise WorkerBroken("the p2p daemon of this peer was ended by something else")
        if not self._averager.is_alive():
            raise WorkerBroken("the averager process of this peer was ended by something else")
        if moved(self._averager.dht.listening):
            raise WorkerBroken("this machine has other addresses than when this peer began to listen")

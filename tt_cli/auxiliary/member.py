"""An auxiliary peer's part in the swarm: it follows the state, hands it out, leads the others of its kind or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from tt_cli import __version__
from tt_cli.auxiliary.lease import Lease
from tt_cli.auxiliary.state_follower import StateFollower
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.errors import TTError
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Emit, Log
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory, SwarmState

AUX_LOOK_SECONDS = 3.0  # nothing waits for an auxiliary peer


class AuxiliaryMember:
    """Follows with the keeper, publishes on the directory, carries the orders out. lease: its own. user: its owner."""

    def __init__(
        self,
        run: RunConfig,
        keeper: StateKeeper,
        averager: Averager,
        directory: PeerDirectory,
        orders: OrganiserOrders,
        lease: Lease,
        user: str,
        emit: Emit,
    ):
        self._keeper, self._averager, self._directory, self._orders = keeper, averager, directory, orders
        self.lease, self._user, self._emit, self._clock = lease, user, emit, averager.clock
        self._peer_id = str(averager.peer_id)
        self._follower = StateFollower(run, keeper, averager, lambda: directory.view, emit)
        if keeper.position[1]:  # else it holds nothing, and may have carried the order out long ago
            orders.begin(keeper.epoch)
        averager.era = orders.era
        self._leader = self._failed = ""
        self._following: Any = None
        directory.expect(AUX_LOOK_SECONDS)
        directory.start()

    def look(self) -> SwarmState:
        """Lead, publish and follow as is due. Raises what broke the state."""
        if self._follower.broken is not None:
            raise self._follower.broken
        busy = self._following is not None and self._following.is_alive()
        if (order := self._orders.due) and not busy:
            self._go_back(order)
        swarm = self._directory.view
        self._look_for_leader(swarm)
        self._publish()
        of_now = all(record.era == self._orders.era for record in swarm.records)  # an order may be newer than the view
        if not busy and of_now and self._follower.wants(swarm):  # it may take minutes
            self._following = self._clock.thread(partial(self._follower.follow, swarm), "follower")
        return swarm

    def _look_for_leader(self, swarm: SwarmState) -> None:
        now = self._clock.dht_time()
        fresh = [record for record in swarm.records if record.role == "aux" and record.time > now - self.lease.lasts]
        self.lease.look({record.peer_id: record.lease for record in fresh}, now)
        holder = self.lease.holder
        if holder and holder != self._leader and (self._leader or len(fresh) > 1):  # of one alone there is no word
            leader = "this auxiliary peer" if holder == self._peer_id else f"…{holder[-6:]}"
            self._emit(Log(f"{leader} leads: it publishes for all auxiliary peers of the run"))
            self._leader = holder

    def _go_back(self, order: RollBack) -> None:
        try:
            self._orders.done(order)
            self._averager.era = self._orders.era
            self._follower.begin_anew()
            self._emit(Log(f"the organiser took the run back to step {order.step}; holding step {self._keeper.epoch}"))
        except (TTError, OSError) as error:
            if str(error) != self._failed:  # it stays due, and is tried at every look
                self._failed = str(error)
                self._emit(Log(f"cannot go back to step {order.step}, as the organiser ordered: {error}", "error"))

    def _publish(self) -> None:
        epoch, digest = self._keeper.position
        self._directory.publish(
            PeerRecord(
                peer_id=self._peer_id,
                role="aux",
                user=self._user,
                version=__version__,
                client_mode=False,
                epoch=epoch,
                digest=digest,
                samples=0,
                samples_per_second=0.0,
                total_samples=0,
                era=self._orders.era,
                lease=self.lease.since if self.lease.candidate else None,
                bytes_sent=int(self._averager.traffic[0]),
                bytes_received=int(self._averager.traffic[1]),
                time=self._clock.dht_time(),
            )
        )

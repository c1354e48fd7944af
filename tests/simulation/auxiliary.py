"""A simulated auxiliary peer: the real member of the swarm, over a state that costs nothing and a disk in memory."""

from __future__ import annotations

from typing import Any

from simulation.averager import SimulatedAverager
from simulation.machine import EXPIRATION, Machine
from simulation.state import SimulatedState, SimulatedTree

from tt_cli.auxiliary.lease import LEASE_SECONDS, Lease
from tt_cli.auxiliary.member import AuxiliaryMember
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.identity.passes import RollBack
from tt_cli.supervisor.events import Event
from tt_cli.swarm.records.publisher import PeerDirectory
from tt_cli.swarm.shared_state import LockedState

NUMBERS = 60, 61  # of auxiliary peers, whatever the number of members
LOOK_SECONDS = 0.5


class MemoryKeeper(StateKeeper):
    """Without files. disk: the states of its checkpoints, which outlive it."""

    def __init__(self, trained: SimulatedState, disk: dict[tuple[int, str], None]):
        self.trained: Any = trained
        self.state, self._disk = LockedState(self.trained), disk
        self._accepted = self.state.position if disk else (0, "")

    def save(self, sure: bool = False) -> None:
        self._disk[self.position] = None

    def go_back(self, order: RollBack) -> None:
        self._accepted, tree = (0, ""), SimulatedTree(order.step, order.digest)
        if tuple(tree) in self._disk:
            self.state.patch(tree, {index: memoryview(tree.chunk(index)) for index in range(len(tree))})
            self.accept()


class AuxiliaryMachine(Machine):
    """Follows the members until it is killed, and again from its newest checkpoint. events: all that it told."""

    averager_type = SimulatedAverager
    keeper: MemoryKeeper | None = None

    @property
    def position(self) -> tuple[int, str]:
        return (0, "") if self.keeper is None else self.keeper.position

    @property
    def due(self) -> bool:
        """True when its next checkpoint is: it takes its time where states come slowly, as from who hangs."""
        return self.keeper is None or self.clock.monotonic() >= self.member._follower._due_at

    @property
    def leader(self) -> str:
        """The peer id that leads the auxiliary peers, as it sees it; "" for none."""
        return "" if self.keeper is None else self.member.lease.holder

    def start(self) -> None:
        self.keeper = None
        super().start()

    def _work(self, dht: Any, identity: Any, known: list[str]) -> None:
        trained, self.events = self._state_type(max(self.checkpoints, default=(0, "00"))), list[Event]()
        keeper = MemoryKeeper(trained, self.checkpoints)
        ways = {"source": keeper.hand_over, "read_tree": trained.read_tree, "clock": self.clock}
        self.averager = self.averager_type(self.run, dht, identity, trained.shapes(), **ways)
        directory = PeerDirectory(self.run, dht, identity, clock=self.clock)
        lease, orders = Lease(self.name, (), min(LEASE_SECONDS, EXPIRATION)), self._orders_type(dht.membership, self)
        ours: Any = keeper, self.averager, directory, orders, lease, self.user
        self.member, self.keeper = AuxiliaryMember(self.run, *ours, self.events.append), keeper
        self.clock.thread(self._look, "coordinator")

    def _look(self) -> None:
        try:
            while not self.process.dead:
                self.member.look()
                self.clock.sleep(LOOK_SECONDS)
        except Exception as error:
            self.error = error

    def leave(self, order: RollBack) -> None:
        super().leave(order)
        if self.keeper is not None:
            self.keeper.go_back(order)

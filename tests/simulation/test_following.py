"""An auxiliary peer beside members who make steps, with real averagers: what it takes either way, what it writes."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import msgpack
from hivemind.p2p import PeerID
from simulation.averager import SimulatedAverager
from simulation.machine import Machine, identity_of, run_of
from simulation.network import Dht, Line, Network, Node
from simulation.state import CHUNK, SimulatedState, SimulatedTree
from simulation.virtual import Process, VirtualClock, in_virtual_time

from tt_cli.auxiliary.state_follower import StateFollower
from tt_cli.supervisor.events import Event, Step, Synchronised
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.records.publisher import PeerDirectory
from tt_cli.swarm.shared_state import LockedState

MEMBERS, STEPS, AUX = 3, 30, 9
LOOK_SECONDS = 0.5


class LongTree(SimulatedTree):
    """A tree of so many chunks that the state has six times the bytes of an average, as with 8-bit moments."""

    CHUNKS = 224

    @property
    def nbytes(self) -> int:
        return CHUNK * self.CHUNKS

    def __len__(self) -> int:
        return self.CHUNKS

    def differing(self, other: SimulatedTree) -> list[int]:
        return list(range(len(self))) if other.digest != self.digest else []


class LongState(SimulatedState):
    """A state with such a tree."""

    @property
    def tree(self) -> LongTree:
        return LongTree(self.epoch, self.digest)

    def read_tree(self, manifest: bytes) -> LongTree:
        return LongTree(*msgpack.unpackb(manifest))


class Held:
    """In the place of a `StateKeeper`. checkpoints: what was written."""

    def __init__(self) -> None:
        self.trained: Any = LongState()
        self.state = LockedState(self.trained)
        self.position, self.checkpoints = (0, ""), list[tuple[int, str]]()

    @property
    def epoch(self) -> int:
        return self.position[0]

    def accept(self) -> None:
        self.position = self.state.position

    def save(self) -> None:
        self.checkpoints.append(self.position)


class Followed(NamedTuple):
    """received: bytes of averages and chunks. averages, states: how many of them. signed: states that members made."""

    received: int
    averages: int
    states: int
    checkpoints: list[tuple[int, str]]
    signed: set[tuple[int, str]]


class NoAverages(SimulatedAverager):
    """As before there were averages to follow by."""

    def fetch_average(self, donors: Any, state_key: str, timeout: float) -> None:
        return None


async def _follow(pace: float, kind: type[SimulatedAverager]) -> Followed:
    network, run = Network(random.Random(0), Line(), (), {}, None), run_of(MEMBERS, "mean")
    signed, events, held = set[tuple[int, str]](), list[Event](), Held()
    process, identity, clock = Process([]), identity_of(AUX), VirtualClock()
    dht: Any = Dht(Node(network, AUX, PeerID.from_base58(identity.peer_id), process), Admission(run), False)

    def note(machine: Machine, step: Step, alone: bool) -> None:
        signed.add((step.epoch, step.digest))

    async def begin() -> SimulatedAverager:
        sharing: dict[str, Any] = {"source": lambda: None, "read_tree": LongState().read_tree, "clock": clock}
        averager = kind(run, dht, identity, LongState().shapes(), **sharing)
        directory, keeper = PeerDirectory(run, dht, identity, clock=clock), held  # type: Any, Any
        follower = StateFollower(run, identity.peer_id, keeper, averager, lambda: directory.view, events.append)
        directory.start()

        def work() -> None:
            while not process.dead:
                clock.sleep(LOOK_SECONDS)
                if follower.wants(view := directory.view):
                    follower.follow(view)

        clock.thread(work, "aux")
        return averager

    machines = [Machine(network, number, run, note, state=LongState, pace=pace) for number in range(MEMBERS)]
    for machine in machines:
        machine.start()
    averager = await process.run(begin())
    while len(signed) < STEPS:
        await asyncio.sleep(1.0)
    for each in (*machines, process):
        each.kill()
    taken = [event for event in events if isinstance(event, Synchronised)]
    averages = sum(not event.chunks for event in taken)
    return Followed(int(averager.traffic[1]), averages, len(taken) - averages, held.checkpoints, signed)


def both_ways(pace: float) -> tuple[Followed, Followed]:
    """By averages where that is cheaper, and by states alone. pace: see `Machine`."""
    return in_virtual_time(_follow(pace, SimulatedAverager)), in_virtual_time(_follow(pace, NoAverages))


def test_averages_are_taken_where_they_are_less_than_states() -> None:
    by_averages, by_states = both_ways(pace=4.0)
    assert by_averages.averages >= STEPS - 1 and not by_averages.states, "every step, from the first state on"
    assert by_averages.received < 0.75 * by_states.received
    assert len(by_averages.checkpoints) > len(by_states.checkpoints) > 4
    for way in (by_averages, by_states):
        assert set(way.checkpoints[1:]) <= way.signed, "to the last bit what the members hold"


def test_states_are_taken_where_steps_are_many() -> None:
    by_averages, by_states = both_ways(pace=0.2)
    assert by_averages.states and by_averages.received <= by_states.received + LongTree(0, "").nbytes
    assert set(by_averages.checkpoints[1:]) <= by_averages.signed

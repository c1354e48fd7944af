"""An auxiliary peer beside members who make steps, with real averagers: what it takes either way, what it writes."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import msgpack
from simulation.auxiliary import NUMBERS, AuxiliaryMachine
from simulation.averager import SimulatedAverager
from simulation.machine import Machine, run_of
from simulation.network import Line, Network
from simulation.state import CHUNK, SimulatedState, SimulatedTree
from simulation.virtual import in_virtual_time

from tt_cli.supervisor.events import Step, Synchronised

MEMBERS, STEPS = 3, 30


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

    tree_type = LongTree

    @property
    def tree(self) -> LongTree:
        return self.tree_type(self.epoch, self.digest)

    def read_tree(self, manifest: bytes) -> LongTree:
        return self.tree_type(*msgpack.unpackb(manifest))


class ShortTree(LongTree):
    """As many bytes as two averages."""

    CHUNKS = 72


class ShortState(LongState):
    """A state with that."""

    tree_type = ShortTree


class Followed(NamedTuple):
    """received: bytes of averages and chunks. averages, states: how many of them. signed: states that members made."""

    received: int
    averages: int
    states: int
    checkpoints: list[tuple[int, str]]
    signed: set[tuple[int, str]]


class NoAverages(SimulatedAverager):
    """As before there were averages to follow by."""

    def fetch_average(self, donors: Any, state_key: str, timeout: float, plan: Any = None) -> None:
        return None


class WithoutAverages(AuxiliaryMachine):
    """One that takes states."""

    averager_type = NoAverages


async def _follow(pace: float, kind: type[AuxiliaryMachine], state: type[LongState]) -> Followed:
    network, run, signed = Network(random.Random(0), Line(), (), {}), run_of(MEMBERS, "mean"), set[tuple[int, str]]()

    def note(machine: Machine, step: Step, alone: bool) -> None:
        signed.add((step.epoch, step.digest))

    machines = [Machine(network, number, run, note, state=state, pace=pace) for number in range(MEMBERS)]
    auxiliary = kind(network, NUMBERS[0], run, None, state=state)
    for machine in (*machines, auxiliary):
        machine.start()
    while len(signed) < STEPS:
        await asyncio.sleep(1.0)
    for machine in (*machines, auxiliary):
        machine.kill()
    taken = [event for event in auxiliary.events if isinstance(event, Synchronised)]
    averages, received = sum(not event.chunks for event in taken), int(auxiliary.averager.traffic[1])
    return Followed(received, averages, len(taken) - averages, list(auxiliary.checkpoints), signed)


def both_ways(pace: float, state: type[LongState]) -> tuple[Followed, Followed]:
    """By averages where that is cheaper, and by states alone. pace: see `Machine`."""
    kinds = AuxiliaryMachine, WithoutAverages
    by_averages, by_states = (in_virtual_time(_follow(pace, kind, state)) for kind in kinds)
    return by_averages, by_states


def test_averages_are_taken_where_they_are_less_than_states() -> None:
    by_averages, by_states = both_ways(4.0, LongState)
    assert by_averages.averages >= STEPS - 1 and not by_averages.states, "every step, from the first state on"
    assert by_averages.received < 0.75 * by_states.received
    assert len(by_averages.checkpoints) > len(by_states.checkpoints) > 4
    for way in (by_averages, by_states):
        assert set(way.checkpoints[1:]) <= way.signed, "to the last bit what the members hold"


def test_states_are_taken_where_steps_are_many() -> None:
    by_averages, by_states = both_ways(0.2, ShortState)
    assert by_averages.states and by_averages.received <= by_states.received + ShortTree(0, "").nbytes
    assert set(by_averages.checkpoints[1:]) <= by_averages.signed

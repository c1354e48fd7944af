"""What records cost the lines of a swarm, and that all see all of them: real nodes on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hivemind.p2p import PeerID
from simulation.dht import HashSignatures, RealDht
from simulation.machine import identity_of, key_of, run_of
from simulation.network import Line, Network, Node, address_of
from simulation.virtual import Process, in_virtual_time
from swarm.made import record

from scripts.benchmarks.records import Links, measure_simulated
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.records.peer_record import peers_key

GOAL = 0.05  # Mbit/s up of a peer, mean
MANY, LOOKS = 40, 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_records_cost_a_small_swarms_lines_little_and_are_soon_seen() -> None:
    figures = measure_simulated(Links(peers=8, steps=1))
    assert figures["between_mbit_mean"] < GOAL and figures["in_rounds_mbit_mean"] < GOAL
    assert figures["trigger_late_s"] < 5.0 and figures["told_s"] < 5.0  # seconds of the virtual clock


class Crowd:
    """Many nodes, which joined through the first. Each has stored its record."""

    def __init__(self) -> None:
        self.run = run_of(MANY, "mean")
        self.network, self.nodes = Network(random.Random(0), Line(), (), {}), list[RealDht]()
        self._key = peers_key(self.run.identity)

    async def begin(self) -> None:
        first = [f"{address_of(0)}/p2p/{key_of(0).peer_id}"]
        for number in range(MANY):
            signatures = HashSignatures(identity_of(number).key)
            carrier = Node(self.network, number, PeerID.from_base58(key_of(number).peer_id), Process([]))
            self.nodes.append(RealDht(carrier, self.run, Admission(self.run), signatures))
            await self.nodes[-1].join(first if number else [], ())
        await asyncio.gather(*(self.tell(number, 10) for number in range(MANY)))
        await asyncio.gather(*(self.samples(number, latest=True) for number in range(MANY)))

    async def tell(self, number: int, samples: int) -> None:
        now = asyncio.get_running_loop().time()
        told = record(key_of(number).peer_id, samples=samples, time=now).model_dump()
        owner = HashSignatures(key_of(number)).local_public_key
        assert await self.nodes[number].dht_node.store(self._key, told, now + 20.0, subkey=owner)

    async def samples(self, number: int, latest: bool = False) -> dict[str, int]:
        """By peer id, as a look of this node shows them."""
        found: Any = await self.nodes[number].dht_node.get(self._key, latest=latest)
        return {entry.value["peer_id"]: entry.value["samples"] for entry in found.value.values()}

    async def look(self) -> list[dict[str, int]]:
        """Of all nodes."""
        return await asyncio.gather(*map(self.samples, range(MANY)))


def test_looks_of_many_are_answered_by_more_than_keep_the_records_and_show_all_of_them() -> None:
    async def test() -> None:
        crowd = Crowd()
        await crowd.begin()
        crowd.network.log = []
        for number in range(LOOKS):
            await crowd.tell(number, 11)
            await crowd.look()  # those who keep it tell it to those around them
            assert all(seen[key_of(number).peer_id] == 11 for seen in await crowd.look())
        asked = Counter(target for _, _, target, method, _ in crowd.network.log if method == "rpc_records")
        looks = 2 * LOOKS * MANY
        assert len(asked) >= 20 and max(asked.values()) < looks / 7, "five would answer a fifth each"
        assert asked.total() < 1.5 * looks

    in_virtual_time(test())

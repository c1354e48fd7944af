"""A crowd that takes a state from a few members, who make steps meanwhile, over lines of so many bytes a second.

The members are whole machines (machine.py), the crowd runs the product's client and server of states and reads the
members' records. A chunk and a part are small here, and stand on the lines for as much as in a run of some size.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from simulation.lines import HEAD, MBIT, Lines, Rate
from simulation.machine import Machine, key_of, measured_line, run_of
from simulation.network import Dht, Line, Network, Node
from simulation.state import SimulatedState
from simulation.virtual import Process, in_virtual_time

from tt_cli.swarm.compression.gradient_buffer import PART_ELEMENTS
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.records.publisher import read_records
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import StepFacts
from tt_cli.swarm.state.client import StateClient, WantedState
from tt_cli.swarm.state.server import StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests

MEMBERS, WARM_STEPS = 4, 4  # steps until the members have measured their lines
STATE_PER_GRADIENT = 6  # bytes: fp32 parameters and two moments of 8 bits to 8 bits
CHUNK, CHUNK_STANDS_FOR = 2**11, 2**20
GRADIENT = {"weight": torch.ones(8, PART_ELEMENTS)}
WITHIN = 5.0  # seconds in which the crowd comes


@dataclass(frozen=True)
class Setting:
    """takers: how many. chunks: of the state. hand_on: whether takers do. mbit: of each line, each way.

    computing: seconds in which the members compute the samples of a step, in rounds' lengths.
    """

    takers: int
    chunks: int = 256
    hand_on: bool = True
    mbit: float = 20.0
    computing: float = 2.0

    @property
    def gradient_bytes(self) -> float:
        """On the line."""
        return self.chunks * CHUNK_STANDS_FOR / STATE_PER_GRADIENT

    @property
    def round_seconds(self) -> float:
        """In which a line carries what a member sends in a round."""
        return 2 * (MEMBERS - 1) / MEMBERS * self.gradient_bytes / (self.mbit * MBIT)


@dataclass(frozen=True)
class Taken:
    """What came of it. seconds: until each had the state, from its own start. copies: of it that the members sent.

    step_seconds, round_seconds: means while the state was taken.
    """

    seconds: tuple[float, ...]
    copies: float
    step_seconds: float
    round_seconds: float


@functools.lru_cache(2**14)
def _chunk(digest: str, index: int) -> bytes:
    return hashlib.shake_128(f"{digest} {index}".encode()).digest(CHUNK)


class CrowdTree(NamedTuple):
    """As `SimulatedTree`, of as many chunks as there are to be."""

    step: int
    digest: str
    chunks: int

    @property
    def nbytes(self) -> int:
        return CHUNK * self.chunks

    def __len__(self) -> int:
        return self.chunks

    def holds(self, index: int, data: bytes | memoryview) -> bool:
        return bytes(data) == _chunk(self.digest, index)

    def name_of(self, index: int) -> str:
        return f"weight[{index}]"

    def place(self, index: int) -> tuple[int, int]:
        return CHUNK * index, CHUNK

    def manifest(self) -> bytes:
        return msgpack.packb(tuple(self))


def read_tree(manifest: bytes) -> CrowdTree:
    """The tree of a manifest."""
    return CrowdTree(*msgpack.unpackb(manifest))


class LargeState(SimulatedState):
    """A state of so many chunks."""

    def __init__(self, chunks: int, position: tuple[int, str]):
        super().__init__(position)
        self._chunks = chunks

    @property
    def tree(self) -> Any:
        return CrowdTree(self.epoch, self.digest, self._chunks)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: gradient.shape for name, gradient in GRADIENT.items()}

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        values = gradients["weight"].numpy()
        self.epoch, self.digest = self.epoch + 1, hashlib.sha256(self.digest.encode() + values.tobytes()).hexdigest()
        return StepFacts(0.1, 1.0)

    def read_tree(self, manifest: bytes) -> Any:
        return read_tree(manifest)

    def write_into(self, write: Any) -> Any:
        for index in range(self._chunks):
            write(CHUNK * index, _chunk(self.digest, index))
        return self.tree


class CrowdLines(Lines):
    """Lines on which a chunk and a part are as long as in a run of this size."""

    def __init__(self, setting: Setting):
        rate = Rate(setting.mbit * MBIT, setting.mbit * MBIT)
        super().__init__(dict.fromkeys(range(MEMBERS + setting.takers), rate))
        self._of_round = setting.gradient_bytes / GRADIENT["weight"].numel()

    def size(self, what: str, message: Any) -> int:
        held = message.ByteSize() if hasattr(message, "ByteSize") else 0
        if isinstance(message, averaging_pb2.AveragingData):
            return HEAD + held + round(len(message.tensor_part.buffer) * self._of_round)
        return HEAD + (held - CHUNK + CHUNK_STANDS_FOR if what == "rpc_state_chunks!" and held > CHUNK else held)


class MemberLine(BandwidthLimiter):
    """A member's line, on which a chunk is as long as on `CrowdLines`."""

    async def give_way(self, count: int) -> bool:
        return await super().give_way(count * CHUNK_STANDS_FOR // CHUNK)


class Joiner:
    """One of the crowd. given_by: who gave it the state, with their bytes."""

    def __init__(self, network: Network, number: int, run: Any, hand_on: bool):
        process, name = Process([]), key_of(number).peer_id
        self._node, self._run = Node(network, number, PeerID.from_base58(name), process), run
        membership = Admission(run)
        dht: Any = Dht(self._node, membership, False)
        self._server = StateServer(self._nothing, read_tree, lambda count: None, membership)
        now = asyncio.get_running_loop().time
        self._digests = TrustedDigests(lambda: read_records(dht, run, now()), name, secret=name)
        self._lend = self._server.lend if hand_on else None
        self.given_by = Counter[str]()

    async def _nothing(self) -> None:
        return None

    async def take(self, after: float) -> float:
        """Seconds that it took."""
        await asyncio.sleep(after)
        await self._server.add_p2p_handlers(self._node, namespace=self._run.identity)  # type: ignore[arg-type]
        began = asyncio.get_running_loop().time()
        wanted = WantedState(read_tree, 60.0, lend=self._lend)
        node: Any = self._node
        client = StateClient(node, self._run.identity, self._digests, StateBuffer.new(), wanted)
        await client.take()
        self._server.end_lending(True)
        self.given_by = client.donors
        return asyncio.get_running_loop().time() - began


async def _take(setting: Setting) -> Taken:
    lines = CrowdLines(setting)
    network, loop = Network(random.Random(0), Line(), (), {}, lines), asyncio.get_running_loop()
    run = run_of(MEMBERS, "mean").replaced(
        {
            "swarm.matchmaking_time": 5.0,
            "swarm.next_chunk_timeout": 100.0,
            "swarm.averaging_timeout": 300.0,
            "swarm.statistics_expiration": 600.0,
        }
    )
    steps, rounds = list[float](), list[float]()

    def note(machine: Machine, step: Any, alone: bool) -> None:
        if machine is machines[0]:
            steps.append(loop.time())
            rounds.append(machine.last_round.seconds["transfer"])

    state = functools.partial(LargeState, setting.chunks)
    pace = setting.computing * setting.round_seconds / 2  # a micro-batch of two
    ways: dict[str, Any] = {"state": state, "pace": pace, "gradients": GRADIENT}
    machines = [
        Machine(network, number, run, note, line=measured_line(network, number, MemberLine), **ways)
        for number in range(MEMBERS)
    ]
    for machine in machines:
        machine.start()
    while len(steps) < WARM_STEPS:
        await asyncio.sleep(1.0)
    joiners = [Joiner(network, MEMBERS + number, run, setting.hand_on) for number in range(setting.takers)]
    entropy, first = random.Random(1), len(steps)
    times = [joiner.take(entropy.uniform(0.0, WITHIN) if number else 0.0) for number, joiner in enumerate(joiners)]
    seconds = await asyncio.gather(*times)
    while len(steps) < first + 2:
        await asyncio.sleep(1.0)
    for machine in machines:
        if machine.error is not None:
            raise machine.error
        machine.kill()
    during = [later - earlier for earlier, later in pairwise(steps[first - 1 :])]
    sent = sum(joiner.given_by[machine.name] for machine in machines for joiner in joiners)
    copies = sent / (CHUNK * setting.chunks)
    return Taken(tuple(seconds), copies, statistics.mean(during), statistics.mean(rounds[first:]))


def taken(setting: Setting) -> Taken:
    """Have a crowd take the state; in virtual time."""
    return in_virtual_time(_take(setting))

"""One simulated machine: a trainer that runs the real `Collaboration`, crashes, and begins again from its backup."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind.p2p import PeerID
from simulation.averager import SimulatedAverager
from simulation.dht import JOIN_SECONDS, HashSignatures, RealDht
from simulation.network import Dht, Network, Node, address_of
from simulation.organiser import AUTHORITY, Holder, Orders, pass_of
from simulation.state import SimulatedState, SimulatedTree, gradient_of
from simulation.virtual import Process, VirtualClock

from tt_cli.identity.passes import RollBack, public_text
from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.supervisor.events import Round, Step, Synchronised
from tt_cli.swarm.collaboration import About, Collaboration, NetworkAccess
from tt_cli.swarm.compression.accumulator import Accumulator, FigureSums
from tt_cli.swarm.compression.gradient_buffer import GradientBuffer
from tt_cli.swarm.membership.rsa_identity import peer_id_of
from tt_cli.swarm.network.bandwidth import BandwidthLimiter, UploadMeter
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import StateLoader

SAMPLES, MICRO_BATCHES = 8, 2  # of a micro-batch; that each gives to a step
EXPIRATION = 20.0
PARTS = {  # processes of a machine, and what hangs when they do
    "trainer": ("trainer",),
    "averager": ("averager",),
    "dht": ("dht",),
    "daemon": ("averager", "dht"),
    "": ("trainer", "averager", "dht"),
}
INITIAL = 0, 1  # machines through which one joins: with the fake DHT the first other one stands for both


class Key:
    """The public half of an RSA key that nobody has: a peer id that follows from a number."""

    def __init__(self, number: int):
        modulus = random.Random(f"key {number}").getrandbits(2048) | 1 | 1 << 2047
        public = RSAPublicNumbers(65537, modulus).public_key()
        self._bytes = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        self.peer_id = peer_id_of(self._bytes)

    def get_public_key(self) -> Key:
        return self

    def to_bytes(self) -> bytes:
        return self._bytes


key_of = functools.lru_cache(Key)


def identity_of(number: int) -> Any:
    """In the place of an `Identity`."""
    return SimpleNamespace(key=key_of(number), peer_id=key_of(number).peer_id, path=Path(f"{number}.key"))


class SimulatedRun(DalleRun):
    """A run whose identity need not be computed at each look."""

    identity: ClassVar[str] = "simulated-00000000"  # type: ignore[misc]


@functools.lru_cache
def run_of(members: int, aggregation: str, closed: bool = False) -> RunConfig:
    """The run of a swarm of so many."""
    keys = {
        "membership.kind": "organisation",
        "membership.organisation": "lab",
        "membership.authority": "http://127.0.0.1:9",
        "membership.authority_key": public_text(AUTHORITY),
    }
    return SimulatedRun.model_validate(load_run("emoji").model_dump()).replaced(
        {
            "swarm.target_batch_size": SAMPLES * MICRO_BATCHES * members,
            "swarm.matchmaking_time": 1.0,
            "swarm.next_chunk_timeout": 1.0,
            "swarm.averaging_timeout": 8.0,
            "swarm.statistics_expiration": EXPIRATION,
            "swarm.large_tensor": 1024,
            "swarm.aggregation": aggregation,
            **(keys if closed else {}),
        }
    )


class ClaimedLine(BandwidthLimiter):
    """A line that says what it carries. upload: kbit/s."""

    upload = 0

    def __init__(self, upload: int):
        super().__init__()
        self.upload = upload


def measured_line(network: Network, number: int, kind: type[BandwidthLimiter] = BandwidthLimiter) -> BandwidthLimiter:
    """A line that measures what it carries, as in production: by what arrived at the others."""
    assert network.lines is not None, "a line without a limit cannot be measured"
    clock = asyncio.get_running_loop().time
    meter = UploadMeter(functools.partial(network.lines.acknowledged, number), clock)
    return kind(meter=meter, clock=clock)


class WaitingAccumulator(Accumulator):
    """Sums that wait while a round has them or another state is taken over, as a peer's local steps do."""

    _holding = False

    @property
    def ready(self) -> bool:
        return not self._holding

    def hold(self, local: GradientBuffer) -> None:
        self._holding = True
        super().hold(local)

    set_aside = hold

    def give_back(self, local: GradientBuffer) -> None:
        super().give_back(local)
        self._holding = False

    def release(self) -> FigureSums:
        self._holding = False
        return super().release()


class Machine:
    """Makes steps until it is killed. watch: told of every step that it made with a group, or alone.

    archives: it has all of its states on its disk, as an auxiliary peer has many. orders: see `Orders`.
    pace: seconds of a micro-batch. gradients: what it gives. idle: it computes none. waits: nor does it while a round
    has its gradient. line: its own; without, it is measured where lines are limited. skew: see `VirtualClock`. user:
    whose it is, in a closed run; "" in an open one. dht: `RealDht`, or what stands in.
    initial: through whom it joins; the first of these is the first of all. met: through whom, too, when it
    begins again; None: it begins alone where nobody answers.
    """

    def __init__(self, network: Network, number: int, run: RunConfig, watch: Any, **ways: Any):
        self.network, self.number, self.run, self._watch = network, number, run, watch
        self.client, self._skew = ways.get("client", False), ways.get("skew", 0.0)
        self._stops: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS[""]}
        self._pace, self._lie, self._joins = ways.get("pace", 0.4), ways.get("lie"), ways.get("joins", False)
        self._line, self.idle, self._waits = ways.get("line"), ways.get("idle", False), ways.get("waits", False)
        self.user: str = ways.get("user", "")
        self._initial, self._met = ways.get("initial", INITIAL), ways.get("met", ())
        self._dht_type: type[Dht] | type[RealDht] = ways.get("dht", Dht)
        self._gradients = ways.get("gradients") or gradient_of(number)
        self._orders_type: type[Orders] = ways.get("orders", Orders)
        self.honest = self._lie is None and self._orders_type is Orders
        self._state_type = ways.get("state", SimulatedState)
        self.peer_id = PeerID.from_base58(key_of(number).peer_id)
        self.backup: tuple[int, str] = (0, "00")
        self.era, self.notices, self._archives = 0, list[str](), ways.get("archives", False)
        self.checkpoints = dict[tuple[int, str], None]()
        self.error: BaseException | None = None
        self.accompanied = False  # it made a step with others
        self.joined = False  # others, or began as the first
        self.collaboration: Any = None  # from when it has joined
        self.starts = 0

    @property
    def alive(self) -> bool:
        return not self.process.dead

    @property
    def keeps(self) -> bool:
        """True while it can hand over whatever it ever held: it accepts connections and did not crash."""
        return not self.client and self.starts == 1

    @property
    def position(self) -> tuple[int, str]:
        """Step and digest of what it holds; (0, "") where it holds nothing."""
        return self.state.epoch, self.state.digest

    @property
    def name(self) -> str:
        return str(self.peer_id)

    def start(self) -> None:
        """Begin, or begin again from the backup."""
        if self.starts:
            self.kill()
        self.trainer, self.process, self.dht = (Process(stops) for stops in self._stops.values())
        self.starts, self.joined = self.starts + 1, False
        self.state = self._state_type(self.backup)
        self.line = self._line or (measured_line(self.network, self.number) if self.network.lines else None)
        self.node = node = Node(self.network, self.number, self.peer_id, self.process, self.line)
        node.liar = self._lie
        self.trainer.run(self._begin(node))

    async def _begin(self, node: Node) -> None:
        self.clock, identity = VirtualClock(self._skew), identity_of(self.number)
        dht, known = await self._join(node, identity)
        self.joined = True
        self._work(dht, identity, known)

    async def _join(self, node: Node, identity: Any) -> tuple[Any, list[str]]:
        """A DHT node that has joined the others, and through whom it may have."""
        # the first peer of a swarm joins nobody; when it comes back it joins the others as they do: one must answer
        first = self.number == self._initial[0] and self.starts == 1 and not self._joins
        known = [] if first else self._addresses(self._initial)
        if self._dht_type is RealDht:
            signatures = HashSignatures(identity.key)
            dht: Any = RealDht(node, self.run, self.holder(), signatures, self.client, self.dht, self.clock)
            await dht.join(known, None if self._met is None else self._met_before())
        else:
            dht, known = Dht(node, self.holder(), self.client, self.dht), known[:1]
            while self.starts > 1 and not self.network.reaches(self.number):
                await asyncio.sleep(JOIN_SECONDS)
        return dht, known

    def _met_before(self) -> list[str]:
        return self._addresses(self._met if self._met and self.starts > 1 else ())

    def _addresses(self, numbers: Iterable[int]) -> list[str]:
        others = (number for number in numbers if number != self.number)
        return [f"{address_of(number)}/p2p/{key_of(number).peer_id}" for number in others]

    def _work(self, dht: Any, identity: Any, known: list[str]) -> None:
        node = self.node
        access = NetworkAccess(dht, identity, self.line, known, self.clock, SimulatedAverager, self._met_before())
        about, orders = About(micro_batch=SAMPLES, user=self.user), self._orders_type(dht.membership, self)
        hear = functools.partial(self._hear, node.process)
        sums = self.accumulator()
        self.collaboration = Collaboration(self.run, access, self.state, about, hear, orders, accumulator=sums)
        self.clock.thread(self._train, "trainer")

    def holder(self) -> Holder:
        """What one of its processes knows of passes and notices."""
        shown = pass_of(self.name, self.user, self.run.identity) if self.user else ""
        return Holder(self.run, shown, self.notices)

    def ways_back(self, order: RollBack) -> Iterator[StateLoader]:
        """Its disk, or what the organiser has published."""
        tree = SimulatedTree(order.step, order.digest)
        if order.source or tuple(tree) in self.checkpoints:

            def load() -> tuple[SimulatedTree, StateBuffer, str]:
                buffer = StateBuffer.new()
                tree.write_into(buffer.write)
                return tree, buffer, "a checkpoint"

            yield load

    def leave(self, order: RollBack) -> None:
        """Set aside what it has of later steps."""
        for state in [state for state in self.checkpoints if state[0] > order.step]:
            del self.checkpoints[state]
        if self.backup[0] > order.step:
            self.backup = max(self.checkpoints, default=(0, "00"))

    def accumulator(self) -> Accumulator | None:
        """One that a round has, where it is not a collaboration's own."""
        return WaitingAccumulator(list(self.state.shapes())) if self._waits else None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of a micro-batch."""
        return self._gradients

    def _train(self) -> None:
        loss, collaboration = torch.ones(()), self.collaboration
        try:
            collaboration.synchronise()
            while not self.process.dead:
                self.clock.sleep(self._pace)
                if self.idle or not collaboration.ready or collaboration.orders.paused:
                    collaboration.stand_by()
                else:
                    collaboration.step(self.gradients(), SAMPLES, loss, {})
        except Exception as error:
            self.error = error

    def _hear(self, process: Process, event: Any) -> None:
        if isinstance(event, Synchronised):
            self.state.taken_at = asyncio.get_running_loop().time()
        if isinstance(event, Round):
            self.last_round = event
        elif isinstance(event, Step) and not process.dead:
            if self._archives:
                self.checkpoints[self.position] = None
            self.accompanied |= self.last_round.outcome != "alone"
            self._watch(self, event, self.last_round.outcome == "alone")

    def stop(self, start: float, stop: float, part: str = "") -> None:
        """Let it hang from then to then, as by SIGSTOP: all of it, or this process of it."""
        for name in PARTS[part]:
            self._stops[name].append((start, stop))

    def kill(self) -> None:
        for process in (self.trainer, self.process, self.dht):
            process.kill()

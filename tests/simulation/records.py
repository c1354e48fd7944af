"""What records cost many peers: the real DHT nodes and `PeerDirectory` of each, on a virtual clock in one process.

What is counted are the bytes of the messages, and so many for each that libp2p and TCP add: see `BESIDE`.
"""

from __future__ import annotations

import asyncio
import functools
import random
from types import SimpleNamespace
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from simulation.dht import RealDht
from simulation.network import Line, Network, Node, address_of
from simulation.virtual import Process, VirtualClock
from testbed.record_peer import RecordPeer

from tt_cli.run import RunConfig
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.rsa_identity import peer_id_of

BESIDE = 800  # bytes that a message takes on a line beside its own, for it has a stream of its own: of 12 real peers
JOINING_AT_ONCE = 20


class MeteredNode(Node):
    """Counts what it sends."""

    sent = messages = 0

    async def _carry(self, source: Any, target: Any, what: str, message: Any = None) -> None:
        source.sent += BESIDE + (0 if message is None else message.ByteSize())
        source.messages += 1
        await super()._carry(source, target, what, message)


class SimulatedPeers:
    """So many peers, which have joined through the first. clock: theirs."""

    def __init__(self, run: RunConfig, seconds: float):
        self.clock = VirtualClock()
        self._run, self._seconds = run, seconds
        self._network = Network(random.Random(0), Line(), (), {})
        self.peers: list[RecordPeer] = []
        self.nodes: list[MeteredNode] = []

    async def join(self, count: int) -> None:
        """Start them."""
        await self._start(0, [])
        first = [f"{address_of(0)}/p2p/{self.nodes[0].peer_id}"]
        for begun in range(1, count, JOINING_AT_ONCE):
            numbers = range(begun, min(count, begun + JOINING_AT_ONCE))
            await asyncio.gather(*(self._start(number, first) for number in numbers))

    async def _start(self, number: int, first: list[str]) -> None:
        key = RSAPrivateKey()
        identity = SimpleNamespace(key=key, peer_id=peer_id_of(key.get_public_key().to_bytes()))
        carrier = MeteredNode(self._network, number, PeerID.from_base58(identity.peer_id), Process([]))
        self.nodes.append(carrier)
        dht = RealDht(carrier, self._run, Admission(self._run), RSASignatureValidator(key), clock=self.clock)
        await dht.join(first, ())
        self.peers.append(RecordPeer(number, self._run, self._seconds, dht, identity, self.clock))

    def sent(self) -> list[int]:
        """By each, since it began."""
        return [node.sent for node in self.nodes]

    def all(self, method: str) -> list[Any]:
        """Have all do the same at once; their answers."""
        answers: list[Any] = [None] * len(self.peers)

        def ask(number: int) -> None:
            answers[number] = getattr(self.peers[number], method)()

        threads = [self.clock.thread(functools.partial(ask, number), method) for number in range(len(self.peers))]
        for thread in threads:
            thread.join()
        return answers

"""What records cost many peers: the real DHT nodes and `PeerDirectory` of each, on a virtual clock in one process.

What is counted are the bytes of the messages, and so many for each that libp2p and TCP add: see `BESIDE`.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from simulation.network import Line, Network, Node
from simulation.virtual import EPOCH, Answer, Process, VirtualClock
from testbed.record_peer import RecordPeer

from tt_cli.run import RunConfig
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.rsa_identity import peer_id_of
from tt_cli.swarm.network.dht_node import ANSWER_SECONDS
from tt_cli.swarm.records import dht_search
from tt_cli.swarm.records.validator import RecordValidator

BESIDE = 800  # bytes that a message takes on a line beside its own, for it has a stream of its own: of 12 real peers
JOINING_AT_ONCE = 20


class MeteredNode(Node):
    """Counts what it sends."""

    sent = messages = 0

    async def _carry(self, source: Any, target: Any, what: str, message: Any = None) -> None:
        source.sent += BESIDE + (0 if message is None else message.ByteSize())
        source.messages += 1
        await super()._carry(source, target, what, message)


class NodeHere:
    """A DHT node, as `PeerDirectory` calls it from its thread."""

    def __init__(self, node: dht_search.DHTNode, membership: Admission):
        self.node, self.membership, self.peer_id = node, membership, node.peer_id

    def get(self, key: str, latest: bool, return_future: bool) -> Answer:
        return self._begun(self.node.get(key, latest=latest))

    def store(self, key: str, subkey: Any, value: Any, expiration_time: float, return_future: bool) -> Answer:
        return self._begun(self.node.store(key, value, expiration_time, subkey=subkey))

    def run_coroutine(self, work: Callable[..., Coroutine[Any, Any, Any]], return_future: bool) -> Answer:
        return self._begun(work(self, self.node))

    def _begun(self, work: Coroutine[Any, Any, Any]) -> Answer:
        answer, task = Answer(), asyncio.get_running_loop().create_task(work)

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                answer.set_exception(error) if (error := task.exception()) else answer.set_result(task.result())

        task.add_done_callback(ended)
        return answer


class SimulatedPeers:
    """So many peers, which have joined through the first. clock: theirs."""

    def __init__(self, run: RunConfig, seconds: float):
        self.clock = VirtualClock(skew=time.time() - EPOCH)
        self._run, self._seconds = run, seconds
        self._network = Network(random.Random(0), Line(), (), {})
        self.peers: list[RecordPeer] = []
        self.nodes: list[MeteredNode] = []

    async def join(self, count: int) -> None:
        """Start them."""
        hivemind_patches.apply()
        await self._start(0, [])
        first = [f"/ip4/192.0.2.1/tcp/1/p2p/{self.nodes[0].peer_id}"]
        for begun in range(1, count, JOINING_AT_ONCE):
            numbers = range(begun, min(count, begun + JOINING_AT_ONCE))
            await asyncio.gather(*(self._start(number, first) for number in numbers))

    async def _start(self, number: int, first: list[str]) -> None:
        key, membership = RSAPrivateKey(), Admission(self._run)
        identity = SimpleNamespace(key=key, peer_id=peer_id_of(key.get_public_key().to_bytes()))
        carrier = MeteredNode(self._network, number, PeerID.from_base58(identity.peer_id), Process([]))
        self.nodes.append(carrier)
        checks = [RSASignatureValidator(key), RecordValidator(self._run.identity, membership)]
        node = await dht_search.DHTNode.create(
            p2p=carrier,
            initial_peers=first,
            record_validator=dht_search.Checked(checks),
            wait_timeout=ANSWER_SECONDS,
            **dht_search.NO_CACHES,
        )
        self.peers.append(
            RecordPeer(number, self._run, self._seconds, NodeHere(node, membership), identity, self.clock)
        )

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

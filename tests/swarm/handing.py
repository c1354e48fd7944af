"""Donors and a taker as libp2p nodes in one process, and the states that they hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import torch
from end_to_end.conftest import tiny_run
from hivemind.p2p import P2P
from swarm.conftest import Libp2p
from swarm.made import record

from tt_cli.checkpoint.hash_tree import CHUNK, StateTree
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.state.client import Chunks, StateClient, WantedState
from tt_cli.swarm.state.server import StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests

RUN = "run-1a2b3c4d"
SHAPES = {"bias": (300,), "weight": (5 * CHUNK // 8 + 77,)}  # of which the weight has three chunks
LARGE = {"bias": (300,), "weight": (3 * CHUNK,)}  # 15 MiB with the codes


def state(step: int = 5, seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> TrainingState:
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    codes = torch.randint(0, 256, shapes["weight"], dtype=torch.uint8, generator=generator)
    return TrainingState(
        step, parameters, {"m.codes/weight": codes, "v/bias": torch.rand(300, generator=generator)}, "", RUN
    )


def read_tree(manifest: bytes) -> StateTree:
    return StateTree.parse(manifest, RUN, LARGE if str(LARGE["weight"][0]).encode() in manifest else SHAPES)


def copy_of(one: TrainingState) -> tuple[bytes, StateBuffer]:
    tree, buffer = one.tree(), StateBuffer.new()
    one.write_into(tree, buffer.write)
    return tree.manifest(), buffer


class Node:
    """A libp2p node that hands out `state`; change it to make a step. calls: copies made. sent: bytes handed out."""

    def __init__(self, p2p: P2P, held: TrainingState | None):
        self.p2p, self.state = p2p, held
        self.peer_id = p2p.peer_id.to_base58()
        self.calls = self.sent = 0
        self.on_sent: Callable[[Node], None] = lambda node: None
        self.change: Callable[[bytes, StateBuffer], tuple[bytes, StateBuffer]] = lambda *offered: offered
        self.donor = StateServer(self._offer, read_tree, self._count, Admission(tiny_run()))

    async def _offer(self) -> tuple[bytes, StateBuffer] | None:
        self.calls += 1
        return None if self.state is None else self.change(*copy_of(self.state))

    def _count(self, count: int) -> None:
        self.sent += count
        self.on_sent(self)

    def record(self, **changes: object) -> PeerRecord:
        assert self.state is not None
        return record(self.peer_id, **{"epoch": self.state.step, "digest": self.state.digest(), **changes})


class Network:
    """Nodes that know each other, and what their members sign."""

    def __init__(self, libp2p: Libp2p, taking: P2P, stack: AsyncExitStack):
        self._libp2p, self._taking, self._stack = libp2p, taking, stack
        self.nodes: list[Node] = []
        self.signed: list[PeerRecord] | None = None  # None: each node its own state

    async def node(
        self, held: TrainingState | None, donor: StateServer | None = None, max_upload: float | None = None
    ) -> Node:
        node = Node(await self._stack.enter_async_context(self._libp2p.node()), held)
        BandwidthLimiter(max_upload).pace(node.p2p)
        await (donor or node.donor).add_p2p_handlers(node.p2p, namespace=RUN)
        self.nodes.append(node)
        return node

    def records(self) -> list[PeerRecord]:
        return [node.record() for node in self.nodes] if self.signed is None else self.signed

    def taker(self, node: Node | None = None, **more: Any) -> StateClient:
        """node: hands on what comes of the state; without, nobody does."""
        if node is not None:
            more["lend"] = node.donor.lend
        wanted = WantedState(**{"read_tree": read_tree, "timeout": 5.0, **more})
        p2p = self._taking if node is None else node.p2p
        return StateClient(p2p, RUN, TrustedDigests(self.records, str(p2p.peer_id)), StateBuffer.new(), wanted)


def over_libp2p(test: Callable[[Network], Awaitable[None]]) -> Callable[[Libp2p], None]:
    def wrapped(libp2p: Libp2p) -> None:
        async def run() -> None:
            async with AsyncExitStack() as stack:
                await test(Network(libp2p, await stack.enter_async_context(libp2p.node()), stack))

        libp2p.run(run())

    wrapped.__name__ = test.__name__
    return wrapped


async def take(taker: StateClient) -> Chunks:
    return (await taker.take()).chunks


def assert_is(chunks: Chunks, expected: TrainingState) -> None:
    found = received_state(chunks.tree, chunks.whole(), "")
    assert (found.step, found.digest()) == (expected.step, expected.digest())

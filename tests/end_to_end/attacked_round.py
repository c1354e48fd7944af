"""Whole rounds between members with libp2p nodes of their own, one of whom attacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035 - hivemind looks at the name of the annotation

import numpy as np
import torch
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from swarm.rounds import SHAPES, Member, Outcome, flattened
from testbed.attacks.gradients import GRADIENTS
from testbed.attacks.gradients import poison as poisoned
from testbed.attacks.rounds import ROUNDS
from testbed.conduct import ConductedAllReduce, ConductedCommit

from tt_cli.swarm.allreduce.messages import Signer
from tt_cli.swarm.membership.rsa_identity import claim_identity

Result = TypeVar("Result")
PATIENCE = 12.0  # seconds; all parts of a sender may take twice as long
NOISE = 0.5  # of a member's gradient, beside what all members have in common


class Node(ServicerBase):
    """One libp2p node. member: who takes part in the present round with it."""

    def __init__(self, p2p: P2P, signer: Signer):
        self.p2p, self.signer = p2p, signer
        self.member: Member | None = None

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        assert self.member is not None
        async for message in self.member.rpc_aggregate_part(stream, context):
            yield message

    async def rpc_settle(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        assert self.member is not None
        return await self.member.rpc_settle(request, context)

    async def rpc_fetch_average(
        self, request: runtime_pb2.ExpertInfo, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        assert self.member is not None
        async for message in self.member.rpc_fetch_average(request):
            yield message


class Nodes:
    """Nodes that know each other, in a thread with a loop of their own. A context manager. folder: for their keys."""

    def __init__(self, count: int, folder: Path):
        self._identities = [claim_identity(folder, "trainer") for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self.nodes: list[Node] = []

    def __enter__(self) -> Nodes:
        self._thread.start()
        self.run(self._start(), 60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._end(), 60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Run this in the nodes' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    async def _start(self) -> None:
        known: list[Any] = []
        for identity in self._identities:
            p2p = await P2P.create(
                initial_peers=known or None,
                host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                dht_mode="server",
                identity_path=str(identity.path),
                check_if_identity_free=False,
            )
            self._stack.push_async_callback(p2p.shutdown)
            known += await p2p.get_visible_maddrs()
            node = Node(p2p, Signer(identity.key))
            await node.add_p2p_handlers(p2p)
            self.nodes.append(node)

    async def _end(self) -> None:
        streams = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for stream in streams:  # that members left open
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self._stack.aclose()

    def round(
        self, attack: str, honest: int, variant: int = 0, patience: float = PATIENCE, hurry: float = 1.0
    ) -> tuple[list[Outcome], list[Member]]:
        """One round of so many honest members and one that attacks in this way ("": nobody does). The outcomes of the
        honest ones, and all members, the attacker last.

        variant: of an attack that has several. patience: of the honest ones, in seconds. hurry: part of it that the
        attacker takes for the whole: what it does just in time, it does in so much less.
        """
        attacks = [("", 0, 1.0)] * honest + ([(attack, variant, hurry)] if attack else [])
        nodes = zip(self.nodes, attacks, strict=False)
        members: list[Member] = [Attacked(i, node, *each, patience) for i, (node, each) in enumerate(nodes)]
        return self.run(_round(members, honest), 60.0), members


class Attacked(Member):
    """A member whose messages travel through its node. attack, variant, hurry: how it misbehaves; "": it is honest."""

    allreduce_type, commit_type = ConductedAllReduce, ConductedCommit

    def __init__(self, number: int, node: Node, attack: str, variant: int, hurry: float, patience: float):
        super().__init__(number % 4)
        self.node, self.attack, self.variant = node, attack, variant
        self.peer = node.p2p.peer_id
        self.seed, self.longest, self.patience = number, 2 * patience, hurry * patience
        self.aggregation = "centered_clip"
        node.member = self

    def gradients(self) -> dict[str, torch.Tensor]:
        """What all have in common, and noise of its own."""
        common, own = np.random.default_rng(1000), np.random.default_rng(self.seed)
        return {
            name: torch.from_numpy(
                common.standard_normal(tuple(shape), dtype=np.float32)
                + np.float32(NOISE) * own.standard_normal(tuple(shape), dtype=np.float32)
            )
            for name, shape in SHAPES.items()
        }

    def prepare(self) -> None:
        super().prepare()
        self.allreduce.signer = self.node.signer
        if self.attack in GRADIENTS:
            poisoned(self.allreduce._local, self.attack, 0, 0)
        elif self.attack:
            assert isinstance(self.allreduce, ConductedAllReduce) and isinstance(self.commit, ConductedCommit)
            self.allreduce.conduct = self.commit.conduct = ROUNDS[self.attack](self.variant)

    def stub(self, peer: PeerID) -> Any:
        return Node.get_stub(self.node.p2p, peer)


async def _round(members: Sequence[Member], honest: int) -> list[Outcome]:
    everybody = {member.peer: member for member in members}
    for member in members:
        member.everybody = everybody
    for member in members:
        member.prepare()
    attackers = [asyncio.create_task(member.take_part()) for member in members[honest:]]
    outcomes = await asyncio.gather(*(member.take_part() for member in members[:honest]))
    for task in attackers:
        task.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    return [outcome for outcome in outcomes if outcome is not None]


def mean_of(members: Sequence[Member]) -> torch.Tensor:
    """Of these members' true gradients, over their samples, none more than all others', in double precision."""
    claimed = [member.allreduce.weight for member in members]
    weights = [min(weight, sum(claimed) - weight) for weight in claimed]
    values = [flattened(member.gradients()).double().numpy() for member in members]
    return torch.from_numpy(np.average(values, axis=0, weights=weights))

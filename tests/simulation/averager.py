"""The averager's process in memory: the real `Averager` over a stand-in for hivemind's `DecentralizedAverager`.

The stand-in finds groups as hivemind's matchmaking does (the leader takes in who asks, until all are there or its time
is up), and gives the trainer's thread the same controls and futures. Signatures are a hash that names its signer; what
members sign when they join, and what all check of it, is the real code's.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import msgpack
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from simulation.virtual import Answer

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.commit import LastVote
from tt_cli.swarm.allreduce.messages import NotProven, Signer
from tt_cli.swarm.audit.audits import Audits
from tt_cli.swarm.audit.sampling import AuditSampler
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.ballot import Ballot, packed, unpacked

RETRY_SECONDS = 0.1
peer_of, peer_at = functools.lru_cache(PeerID.from_base58), functools.lru_cache(PeerID)


class HashSigner(Signer):
    """Signs in a microsecond: what is searched for is who says what, not a weakness of RSA."""

    def __init__(self, peer_id: str):
        self.peer_id, self.opened = peer_id, opened

    def sign(self, fields: Any) -> bytes:
        body, me = msgpack.packb(list(fields)), self.peer_id.encode()
        return wire.ENVELOPE.pack((body, me, hashlib.sha256(me + body).digest()))


@functools.lru_cache(4096)
def opened(envelope: bytes) -> tuple[str, bytes]:
    """As `open_envelope`, of a HashSigner's."""
    try:
        body, signer, signature = wire.ENVELOPE.read(envelope)
        if hashlib.sha256(signer + body).digest() != signature:
            raise NotProven("a signature that is wrong")
        return signer.decode("ascii"), body
    except ValueError as error:
        raise NotProven(str(error)) from None


class MemoryEvidence:
    """In the place of `EvidenceStore`, without files."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def guilty(self) -> frozenset[str]:
        return frozenset(self._kept)

    def read(self, guilty: str) -> bytes:
        return self._kept.get(guilty, b"")

    def keep(self, guilty: str, packed: bytes) -> bool:
        return self._kept.setdefault(guilty, packed) is packed


class MemoryBallot(Ballot):
    """Its file is in the memory of the network, and outlives its process."""

    def __init__(self, files: dict[Path, bytes], path: Path):
        self._files, self._path = files, path

    def read(self) -> LastVote:
        return unpacked(self._files[self._path]) if self._path in self._files else LastVote()

    def keep(self, vote: LastVote) -> None:
        self._files[self._path] = packed(vote)


class Control(Answer):
    """In the place of hivemind's `StepControl`."""

    _data_for_gather = b""

    def __init__(self, ends: float, deadline: float):
        super().__init__()
        self.scheduled_time, self.deadline, self.weight = ends, deadline, 1.0
        self.stage, self.began_allreduce = AveragingStage.LOOKING_FOR_GROUP, False
        self.triggered, self.seeking = asyncio.Event(), None

    @property
    def data_for_gather(self) -> bytes:
        return self._data_for_gather

    def allow_allreduce(self) -> None:
        self.triggered.set()

    def get_timeout(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if self.seeking is not None and not self.began_allreduce:
            self.seeking.cancel()
        return cancelled


class InMemoryAverager(DecentralizedAverager):
    """What `Averager` takes from hivemind."""

    def __init__(self, averaged_tensors: Any, dht: Any, *, prefix: str, client_mode: bool, **settings: Any):
        self.dht, self.prefix, self.client_mode, self._node = dht, prefix, client_mode, dht.node
        self.next_chunk_timeout, self._longest = settings["next_chunk_timeout"], settings["allreduce_timeout"]
        self.matchmaking_kwargs = {"min_matchmaking_time": settings["min_matchmaking_time"]}
        self._running_groups: dict[bytes, asyncio.Future[Any]] = {}
        leaders = SimpleNamespace(target_group_size=0)
        self._matchmaking = SimpleNamespace(
            group_key_manager=None, step_control=None, potential_leaders=leaders, target_group_size=0
        )
        self._outer_pipe, self._inner_pipe = SimpleNamespace(send=self._post), SimpleNamespace(fileno=lambda: 0)
        self._joined: dict[PeerID, bytes] | None = None  # to the group that this peer leads now
        self._came = asyncio.Condition()
        self.began_at = 0.0  # the last group
        self._led: asyncio.Future[GroupInfo] | None = None
        self._node.averager = self
        self._node.process.run(self._serve())

    def __del__(self) -> None: ...

    def __repr__(self) -> str:
        return f"averager {self._node.number}"

    async def _serve(self) -> None:
        if self.client_mode:
            await self.audits.add_p2p_handlers(self._node, namespace=self.prefix)
        else:
            await self.add_p2p_handlers(self._node, namespace=self.prefix)

    def _post(self, message: tuple[str, list[Any], dict[str, Any]]) -> None:
        """The pipe from the trainer's process."""
        method, args, more = message
        self._node.process.run(getattr(self, method)(*args, **more))

    def step(self, *, timeout: float, scheduled_time: float, **_: Any) -> Control:
        skew = self.clock.dht_time() - self.clock.monotonic()
        control = Control(scheduled_time - skew, self.clock.monotonic() + timeout)
        self._post(("_step", [], {"step": control, "future_for_init": None}))
        return control

    async def _step(self, *, step: Control, future_for_init: None) -> None:
        if step.done():
            return
        self._matchmaking.step_control = step
        step.seeking = asyncio.create_task(self._seek(step))
        try:
            async with asyncio.timeout(step.get_timeout()):
                group = await step.seeking
            if step.cancelled():
                return
            step.stage, step.began_allreduce = AveragingStage.RUNNING_ALLREDUCE, True
            self.began_at = self.clock.monotonic()
            self._running_groups[group.group_id] = asyncio.get_running_loop().create_future()
            try:
                result = await asyncio.wait_for(self._aggregate_with_group(group, step.weight), self._longest)
            finally:
                del self._running_groups[group.group_id]
            if not step.done():
                step.set_result(result)
        except asyncio.CancelledError:
            if not step.cancelled():
                raise
        except Exception as error:
            if not step.done():
                step.set_exception(error)

    async def _seek(self, control: Control) -> GroupInfo:
        keys = self._keys()
        seek = self._lead if keys.plan.leader == str(self.peer_id) else self._follow
        group = await seek(control, keys.current_key, peer_of(keys.plan.leader))
        await keys.update_key_on_group_assembled(group)
        control.stage = AveragingStage.AWAITING_TRIGGER
        await control.triggered.wait()
        return group

    async def _lead(self, control: Control, key: str, leader: PeerID) -> GroupInfo:
        loop, entropy = asyncio.get_running_loop(), self._node.network.entropy
        self._joined, self._led, self._led_key = {}, loop.create_future(), key
        try:
            async with self._came:
                left, size = max(0.0, control.scheduled_time - loop.time()), self._matchmaking.target_group_size
                try:
                    async with asyncio.timeout(left):
                        await self._came.wait_for(lambda: len(self._joined) + 1 >= size)
                except TimeoutError:
                    if not self._joined:
                        raise MatchmakingException("could not find a group") from None
            gathered = {self.peer_id: control.data_for_gather, **self._joined}
            group = GroupInfo(entropy.randbytes(8), tuple(gathered), tuple(gathered.values()))
            self._led.set_result(group)
            return group
        finally:
            self._joined = None
            self._led.cancel()

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As hivemind's leader."""
        if self._joined is None or self._led_key != request.group_key:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        joined, led = self._joined, self._led
        async with self._came:
            joined[context.remote_id] = request.gather
            self._came.notify_all()
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        try:
            group = await asyncio.shield(led)
        except asyncio.CancelledError:
            if joined.get(context.remote_id) == request.gather:
                del joined[context.remote_id]
            if not led.cancelled():
                raise
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_DISBANDED)
            return
        yield averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            group_id=group.group_id,
            ordered_peer_ids=[peer.to_bytes() for peer in group.peer_ids],
            gathered=group.gathered,
        )

    async def _follow(self, control: Control, key: str, leader: PeerID) -> GroupInfo:
        shown = control.data_for_gather
        while True:
            request = averaging_pb2.JoinRequest(gather=shown, client_mode=self.client_mode, group_key=key)
            try:
                async for message in await self._stub(leader).rpc_join_group(request):
                    if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                        peers = tuple(map(peer_at, message.ordered_peer_ids))
                        if self.peer_id not in peers or len(peers) != len(message.gathered):
                            raise MatchmakingException("the leader sent a group of others")  # as hivemind asserts
                        return GroupInfo(message.group_id, peers, tuple(message.gathered))
                    if message.code != averaging_pb2.ACCEPTED:
                        break
            except ConnectionError:
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def _get_current_state_from_host_process(self) -> tuple[bytes, Any, Any]:
        metadata, *rest = self.get_current_state()
        return self.serializer.dumps(metadata), *rest

    def is_alive(self) -> bool:
        return True

    def shutdown(self) -> None: ...


class SimulatedAverager(Averager, InMemoryAverager):
    """The real averager."""

    future_type = Answer

    def __init__(self, run: Any, dht: Any, identity: Any, shapes: Any, **more: Any):
        network, me = dht.node.network, str(dht.peer_id)
        dht = copy.copy(dht)
        dht.node.membership = dht.membership = copy.copy(dht.membership)  # of this process: it looks at notices itself
        self.ballot_type, self.secret = functools.partial(MemoryBallot, network.files), me
        super().__init__(run, dht, identity, shapes, **more)
        self.signer, rules = HashSigner(me), replace(self.audits.rules, opened=opened)
        sampler = AuditSampler(random.Random(network.entropy.random()))
        self.audits = Audits(run, rules, self._rounds, self._auditor, self._knows, MemoryEvidence(), sampler)  # type: ignore[arg-type]

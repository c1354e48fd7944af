"""hivemind's averager, with rounds that either give every member the same average or none.

What is ours: members are matched by the state they hold (epoch and digest are part of the group's key, so unlike
peers never meet); a group may form ahead of its round and starts when the expected members are there; the transfer
(`runner.py`) and what follows it (`settle.py`); the local gradient survives a dropped round; the last average stays at
hand for members that missed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, get_dht_time, get_logger
from hivemind.utils.asyncio import achain, as_aiter

from tt_cli.run import RunConfig
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.swarm.codec import codec_of
from tt_cli.swarm.encoded import EncodedBuffer
from tt_cli.swarm.fetch import answer, fetch_whole, read_request
from tt_cli.swarm.handover import StateSharing, StateSource, TreeReader
from tt_cli.swarm.layout import PART_ELEMENTS, Layout
from tt_cli.swarm.meeting import KEPT_GROUPS, Meeting, MeetingPoint
from tt_cli.swarm.runner import Runner
from tt_cli.swarm.settle import Agreement, Settlement, group_of
from tt_cli.swarm.shaping import OVERHEAD, Line
from tt_cli.swarm.store import AverageStore

logger = get_logger(__name__)

MAX_WEIGHT_IN_TARGETS = 4
PULSE_SECONDS = 2.0
PART_BYTES = 2 * PART_ELEMENTS  # of the largest part: fp16


@dataclass(frozen=True)
class RoundResult:
    """How one round went, as this member saw it.

    complete: the average in the store is whole and finite, this peer may step. members: peer id → what it said about
    itself (samples, loss; {} when that got lost). received: what came from the reducers, 0 to 1. mended: parts that
    came from other members. differing: parts in whose bytes members differed. rejected: peer id → why what it sent was
    refused. failed: peer id → why its parts of the average did not all come. disputed: reducers of parts of which no
    bytes had a majority. seconds: of each phase.
    """

    complete: bool = False
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: float = 0.0
    mended: int = 0
    differing: int = 0
    rejected: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disputed: frozenset[str] = frozenset()
    problem: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def samples_and_loss(self) -> tuple[int, float | None]:
        """Samples of all members and their mean loss, from what they said."""
        said = [each for each in self.members.values() if each.get("samples")]
        samples = sum(each["samples"] for each in said)
        return samples, sum(each["loss"] for each in said) / samples if samples else None


class Averager(StateSharing, DecentralizedAverager):
    """The process that speaks for this peer in averaging rounds and hands out its state.

    shapes: name → shape of the gradients; empty for a peer that only hands out state. local: this peer's mean gradient.
    store: the last average. source, read_tree: see StateSharing. max_upload, max_download: bits a second on the line.
    """

    def __init__(
        self,
        run: RunConfig,
        dht: DHT,
        shapes: Mapping[str, torch.Size],
        *,
        source: StateSource,
        read_tree: TreeReader,
        client_mode: bool,
        max_upload: float | None = None,
        max_download: float | None = None,
    ):
        codec = codec_of(run)
        self._line = Line(max_upload, max_download)
        self.layout = Layout(shapes, run.swarm.large_tensor, codec.block)
        self.local = EncodedBuffer(self.layout, codec)
        self.store = AverageStore(self.layout, codec)
        self.traffic = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.max_weight = float(MAX_WEIGHT_IN_TARGETS * run.swarm.target_batch_size)
        self._said = torch.zeros(2, dtype=torch.float64).share_memory_()  # samples, sum of losses: with the next round
        self.pulse = torch.full((1,), time.monotonic(), dtype=torch.float64).share_memory_()  # its process lived then
        self._meeting = Meeting()
        # in the averager's process:
        self._steps = 0  # of hivemind's that run
        self._begun = asyncio.Condition()  # a round began, or will not
        self._given_up: set[bytes] = set()  # groups that this peer was in and left before their round
        self._runners: dict[bytes, tuple[Runner, Settlement]] = {}
        self._committed: tuple[str, Settlement] | None = None
        self.share_state(run, dht, str(dht.peer_id), source, read_tree)
        super().__init__(
            averaged_tensors=[torch.zeros(1)],  # hivemind's own rounds, which never run
            dht=dht,
            start=True,
            prefix=run.identity,
            min_matchmaking_time=run.swarm.matchmaking_time,
            request_timeout=run.swarm.matchmaking_time * 0.8,
            allreduce_timeout=run.swarm.averaging_timeout,
            next_chunk_timeout=run.swarm.next_chunk_timeout,
            client_mode=client_mode,
            allow_state_sharing=False,
            shutdown_timeout=2,
        )
        # uvloop made the pipe non-blocking, in both processes: of a long message, such as a manifest, only a part would
        # be read, and break. hivemind polls before it reads.
        os.set_blocking(self._inner_pipe.fileno(), True)

    # ---------------------------------------------------------------- in the host process

    def slow_line(self) -> str:
        """Words about caps on traffic with which this peer cannot keep up; "" if it can."""
        most = 2 * self.local.nbytes  # of a reducer in a large group, each way: gradients and averages
        seconds, limit = self._line.seconds(most, most), self._allreduce_timeout or math.inf
        if seconds <= limit / 2:
            return ""
        return (
            f"with these caps on traffic a round may take this peer {seconds:.0f} s, and the others wait {limit:.0f} s "
            f"at most: allow {most * OVERHEAD * 16 / limit / 1e6:.1f} Mbit/s each way, or use --client-mode, which "
            "halves what travels"
        )

    def seek(
        self, state_key: str, members: Collection[str], leader: str, swarm: int, avoided: Collection[str] = ()
    ) -> StepControl:
        """Begin to look for the members that hold the same state; they wait for each other's `average`.

        state_key: epoch and digest. members: peer ids of those who should come, this peer included. leader: the one at
        whom they meet. The group is complete when all are there, else after the matchmaking time with those who came.
        swarm: trainers that there are; without more than half of them there is no round. avoided: peer ids with which
        no group is formed.
        """
        meeting = Meeting(state_key, len(members), leader, max(swarm, len(members)), frozenset(avoided))
        self._outer_pipe.send(("_prepare_round", [meeting], {}))
        now, longest = get_dht_time(), self.matchmaking_kwargs["min_matchmaking_time"]
        timeout = 2 * longest + 1.0
        # a leader takes in who waits longer than itself, whoever of the two began earlier
        until = now + longest if leader == str(self.peer_id) else now + timeout - 0.1
        return self.step(timeout=timeout, scheduled_time=until, allow_retries=False, require_trigger=True, wait=False)

    def average(self, control: StepControl, samples: int, loss: float) -> RoundResult:
        """Average `local` in the group that `control` seeks. Never raises for the swarm's faults.

        samples: behind `local`. loss: summed over them.
        """
        started = time.monotonic()
        self._said.copy_(torch.tensor([samples, loss], dtype=torch.float64))
        try:
            # more piles up while rounds fail; the others would refuse it
            control.weight = min(float(samples), self.max_weight)
            control.allow_allreduce()
            limit = control.get_timeout() + (self._allreduce_timeout or 0.0) + 10.0
            return control.result(timeout=limit)
        except Exception as error:  # hivemind passes on whatever broke in the averager's process
            if not control.done():
                control.cancel()
            words = " ".join(str(error).split()) or type(error).__name__
            return RoundResult(problem=words, seconds={"matchmaking": time.monotonic() - started})

    def fetch_average(self, donors: Sequence[str], state_key: str, timeout: float) -> str | None:
        """The average that others stepped with from the state `state_key`, into the store: the donor; None: no luck.

        Nobody vouches for it: whether it is the right one shows in the digest of the state that it leads to.
        """
        future: MPFuture = MPFuture()
        self._outer_pipe.send(("_fetch_average", [list(donors), state_key, future], {}))
        try:
            return future.result(timeout=timeout)
        except Exception as error:  # a time-out, or whatever broke in the averager's process
            logger.info(f"no average was fetched: {error!r}")
            return None

    # ---------------------------------------------------------------- in the averager's process

    def _run_internal(self) -> None:
        torch.set_num_threads(1)
        super()._run_internal()

    @property
    def _p2p(self) -> P2P:  # hivemind sets it when this process starts
        return self._node

    @_p2p.setter
    def _p2p(self, p2p: P2P) -> None:
        self._node = self._line.pace(p2p)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.pulse[0] = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    def _stub(self, peer: PeerID) -> Any:
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    async def _prepare_round(self, meeting: Meeting) -> None:
        self._keys().meeting = self._meeting = meeting
        self._matchmaking.target_group_size = max(2, meeting.expected)
        self._matchmaking.potential_leaders.target_group_size = max(2, meeting.expected)

    def _keys(self) -> MeetingPoint:
        keys = self._matchmaking.group_key_manager
        if not isinstance(keys, MeetingPoint):
            keys = self._matchmaking.group_key_manager = MeetingPoint(
                self.dht, self.prefix, lambda: self._matchmaking.step_control
            )
        return keys

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As hivemind's, but who spoiled a round is not taken into the next one."""
        if str(context.remote_id) in self._meeting.avoided:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        self._steps += 1
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        finally:
            self._steps -= 1
            await asyncio.get_running_loop().run_in_executor(None, release_freed_memory)
            formed = self._keys().formed
            mine = {group_id for group_id, seeker in formed if seeker is step}
            self._given_up = self._given_up & {group_id for group_id, _ in formed} | mine - self._runners.keys()
            async with self._begun:
                self._begun.notify_all()

    async def _aggregate_with_group(self, group_info: GroupInfo, weight: float, **_: Any) -> RoundResult:
        """One round in a group that has formed, from the moment when this peer's gradient is ready."""
        began = time.monotonic()
        try:
            self._meeting.check(group_info)
            runner, settlement = self._begin(group_info, weight)
            self._running_groups[group_info.group_id].set_result(runner)
            async with self._begun:
                self._runners[group_info.group_id] = (runner, settlement)
                for old in list(self._runners)[:-KEPT_GROUPS]:
                    del self._runners[old]
                self._begun.notify_all()
            await runner.run()
            transferred, received = time.monotonic(), self.store.received
            agreement = await settlement.run(runner.gone())
        except Exception as error:
            raise MatchmakingException(f"the round failed: {error}") from error
        ended = time.monotonic()
        whole = not (agreement.lost or agreement.disputed or self.store.missing())
        if whole:
            self._committed = (self._meeting.state_key, settlement)
        statuses = settlement.statuses | {str(self.peer_id): settlement.status()}
        return RoundResult(
            complete=whole,
            members={str(peer): statuses[str(peer)].said if str(peer) in statuses else {} for peer in runner.members},
            received=received,
            mended=settlement.mended,
            differing=len(agreement.differing),
            rejected=runner.rejected | runner.reducer.rejected,
            failed=dict(runner.failed),
            disputed=_disputed(runner, agreement),
            problem="" if whole else _problem(runner, agreement, received),
            seconds={
                "transfer": transferred - began,
                "reduce": runner.reducer.seconds,
                "commit": ended - transferred,
            },
        )

    def _begin(self, group_info: GroupInfo, weight: float) -> tuple[Runner, Settlement]:
        """What this member does in the round of this group. Raises ValueError or TypeError for nonsense from it."""
        listening = []
        for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
            _, mode, _ = self.serializer.loads(data)
            if AveragingMode(mode) != AveragingMode.CLIENT:
                listening.append(peer)
        samples, loss = self._said.tolist()
        busy = 2 * (len(group_info.peer_ids) - 1) * PART_BYTES  # a part on every stream, before the next on one of them
        patience = self.next_chunk_timeout + self._line.seconds(busy, busy)
        runner = Runner(
            group_id=group_info.group_id,
            me=self.peer_id,
            members=group_info.peer_ids,
            listening=listening,
            local=self.local,
            weight=weight,
            max_weight=self.max_weight,
            store=self.store,
            stub_of=self._stub,
            traffic=self.traffic,
            patience=patience,
        )
        settlement = Settlement(
            group_id=group_info.group_id,
            me=self.peer_id,
            members=runner.members,
            listening=runner.reducers,
            parts=len(runner.parts),
            store=self.store,
            said={"samples": int(samples), "loss": loss},
            stub_of=self._stub,
            traffic=self.traffic,
            patience=3 * patience,  # a reducer waits for its senders, its members for it
        )
        return runner, settlement

    async def _round_of(self, group_id: bytes) -> tuple[Runner, Settlement] | None:
        """The round that another member speaks of; waits while this peer may be about to begin it."""

        def known() -> bool:
            return group_id in self._runners or group_id in self._given_up or not self._steps

        async with self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.next_chunk_timeout):
                    await self._begun.wait_for(known)
        return self._runners.get(group_id)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member of the group sends its parts and takes the averages."""
        first = await asyncio.wait_for(anext(stream), self.next_chunk_timeout)
        found = await self._round_of(first.group_id)
        if found is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        async for message in found[0].rpc_aggregate_part(achain(as_aiter(first), stream), context):
            yield message

    async def rpc_settle(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of the group says what it received, and is told what this peer has."""
        found = await self._round_of(group_of(request))
        if found is None:
            raise ValueError("no such round here")
        return await found[1].answer(context.remote_id, request)

    async def rpc_fetch_average(
        self, request: runtime_pb2.ExpertInfo, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        """Parts of the last average, as they travelled."""
        key, parts = read_request(request)
        if isinstance(key, str):
            settlement = self._committed[1] if self._committed is not None and self._committed[0] == key else None
        else:
            settlement = self._runners[key][1] if key in self._runners else None
        if settlement is None or not settlement.holds():
            return
        async for message in answer(self.store, parts, settlement.holds):
            self.traffic[0] += len(message.serialized_info)
            yield message
        await asyncio.sleep(self.next_chunk_timeout)  # the other side hangs up: see Runner.rpc_aggregate_part

    async def _fetch_average(self, donors: Sequence[str], state_key: str, future: MPFuture) -> None:
        def count(size: int) -> None:
            self.traffic[1] += size

        found = None
        try:
            for donor in donors:
                try:
                    stub = self._stub(PeerID.from_base58(donor))
                    whole = await fetch_whole(stub, state_key, self.store, self.next_chunk_timeout, count)
                except Exception as error:  # a donor may fail in any way; the next one is asked
                    logger.info(f"fetching the average from {donor} failed: {error!r}")
                    continue
                if whole:
                    found = donor
                    return
        finally:
            if not future.done():
                future.set_result(found)


def _disputed(runner: Runner, agreement: Agreement) -> frozenset[str]:
    """Reducers of parts about which members disagree, but for this peer."""
    reducers = {runner.reducers[runner.parts[index].reducer] for index in agreement.disputed}
    return frozenset(str(reducer) for reducer in reducers if reducer != runner.me)


def _problem(runner: Runner, agreement: Agreement, received: float) -> str:
    if agreement.disputed:
        return f"members hold unlike bytes of {len(agreement.disputed)} parts of the average"
    part = math.floor(received * 1000) / 10
    reasons = "; ".join(f"{peer}: {why}" for peer, why in runner.failed.items())
    return f"only {part} % of the average arrived ({reasons or 'a reducer left'}), and no member has the rest"

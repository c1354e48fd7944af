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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import achain, as_aiter

from tt_cli.run import RunConfig
from tt_cli.swarm.codec import codec_of
from tt_cli.swarm.fetch import answer, fetch_whole, read_request
from tt_cli.swarm.handover import StateSharing, StateSource, TreeReader
from tt_cli.swarm.layout import Layout
from tt_cli.swarm.runner import Runner
from tt_cli.swarm.settle import Agreement, Settlement, group_of
from tt_cli.swarm.store import AverageStore, Cut

logger = get_logger(__name__)

POLL_SECONDS = 0.1
MAX_WEIGHT_IN_TARGETS = 4
KEPT_ROUNDS = 2  # that others may still ask about


@dataclass(frozen=True)
class RoundResult:
    """How one round went, as this member saw it.

    cut: where the parts of the average lie in the store; None unless the round is complete: the average is whole and
    finite, this peer may step. members: peer id → what it said about itself (samples, loss; {} when that got lost).
    received: what came from the reducers, 0 to 1. mended: parts that came from other members. differing: parts in whose
    bytes members differed. rejected: peer id → why what it sent was refused. failed: peer id → why its parts of the
    average did not all come. disputed: reducers of parts of which no bytes had a majority. seconds: of each phase.
    """

    cut: Cut | None = None
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: float = 0.0
    mended: int = 0
    differing: int = 0
    rejected: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disputed: frozenset[str] = frozenset()
    problem: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True when this peer may step."""
        return self.cut is not None

    def samples_and_loss(self) -> tuple[int, float | None]:
        """Samples of all members and their mean loss, from what they said."""
        said = [each for each in self.members.values() if each.get("samples")]
        samples = sum(each["samples"] for each in said)
        return samples, sum(each["loss"] for each in said) / samples if samples else None


class StateKeyManager(GroupKeyManager):
    """Groups form under a key that names the members' epoch and state, instead of random buckets."""

    def __init__(self, dht: DHT, prefix: str):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.state_key = ""
        self.avoided: frozenset[str] = frozenset()
        self.formed: list[bytes] = []  # the newest groups that this peer was in
        self._asked = -float("inf")

    @property
    def current_key(self) -> str:
        return f"{self.prefix}_{self.state_key}.0b"

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """As hivemind's, but hivemind asks in a busy loop: at most one look-up per POLL_SECONDS."""
        await asyncio.sleep(max(0.0, self._asked + POLL_SECONDS - time.monotonic()))
        self._asked = time.monotonic()
        averagers = await super().get_averagers(group_key, only_active)
        return [(peer, expiration) for peer, expiration in averagers if str(peer) not in self.avoided]

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """The key follows the state alone; the group is remembered."""
        self.formed = [*self.formed[-KEPT_ROUNDS:], group_info.group_id]


class Averager(StateSharing, DecentralizedAverager):
    """The process that speaks for this peer in averaging rounds and hands out its state.

    shapes: name → shape of the gradients; empty for a peer that only hands out state. local: shared fp32 buffer
    (layout.size,) of this peer's mean gradient, `views` its tensors in the order of `shapes`. store: the last average,
    encoded. source, read_tree: see StateSharing.
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
    ):
        self.layout = Layout(shapes, run.swarm.large_tensor)
        self.local = torch.zeros(max(1, self.layout.size)).share_memory_()
        self.views = self.layout.views(self.local)
        self.store = AverageStore(self.layout, codec_of(run))
        self.traffic = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.max_weight = float(MAX_WEIGHT_IN_TARGETS * run.swarm.target_batch_size)
        self._said = torch.zeros(2, dtype=torch.float64).share_memory_()  # samples, sum of losses: with the next round
        self._avoided: frozenset[str] = frozenset()
        self._state_key = ""
        # in the averager's process:
        self._steps = 0  # of hivemind's that run
        self._begun = asyncio.Condition()  # a round began, or will not
        self._given_up: set[bytes] = set()  # groups that this peer was in and left before their round
        self._runners: dict[bytes, tuple[Runner, Settlement]] = {}
        self._committed: tuple[str, Settlement] | None = None
        self.share_state(run, dht, str(dht.peer_id), source, read_tree)
        super().__init__(
            averaged_tensors=[self.local],
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

    # ---------------------------------------------------------------- in the host process

    def seek(self, state_key: str, expected: int, timeout: float, avoided: Sequence[str] = ()) -> StepControl:
        """Begin to look for the members that hold the same state; they wait for each other's `average`.

        state_key: epoch and digest. expected: members that should come, this peer included; the group is complete when
        they are there, else after the matchmaking time with those who came. timeout: seconds to find a group.
        avoided: peer ids with which no group is formed.
        """
        self._outer_pipe.send(("_prepare_round", [state_key, expected, tuple(avoided)], {}))
        return self.step(timeout=timeout, allow_retries=False, require_trigger=True, wait=False)

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

    def take_average(self, cut: Cut) -> None:
        """Replace `local` by the average in the store."""
        self.store.decode(cut, self.local)

    def fetch_average(self, donors: Sequence[str], state_key: str, timeout: float) -> tuple[str, Cut] | None:
        """The average that others stepped with from the state `state_key`, into the store: (donor, cut); None: no luck.

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

    def _stub(self, peer: PeerID) -> Any:
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    async def _prepare_round(self, state_key: str, expected: int, avoided: Sequence[str]) -> None:
        keys = self._keys()
        keys.state_key = self._state_key = state_key
        keys.avoided = self._avoided = frozenset(avoided)
        self._matchmaking.target_group_size = max(2, expected)
        self._matchmaking.potential_leaders.target_group_size = max(2, expected)

    def _keys(self) -> StateKeyManager:
        keys = self._matchmaking.group_key_manager
        if not isinstance(keys, StateKeyManager):
            keys = self._matchmaking.group_key_manager = StateKeyManager(self.dht, self.prefix)
        return keys

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As hivemind's, but who spoiled a round is not taken into the next one."""
        if str(context.remote_id) in self._avoided:
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
            self._given_up.update(set(self._keys().formed) - self._runners.keys())
            self._given_up.intersection_update(self._keys().formed)
            async with self._begun:
                self._begun.notify_all()

    async def _aggregate_with_group(self, group_info: GroupInfo, weight: float, **_: Any) -> RoundResult:
        """One round in a group that has formed, from the moment when this peer's gradient is ready."""
        began = time.monotonic()
        try:
            if spoilers := self._avoided.intersection(map(str, group_info.peer_ids)):
                raise ValueError(f"the group includes {', '.join(sorted(spoilers))}, who spoiled a round")
            runner, settlement = self._begin(group_info, weight)
            self._running_groups[group_info.group_id].set_result(runner)
            async with self._begun:
                self._runners[group_info.group_id] = (runner, settlement)
                for old in list(self._runners)[:-KEPT_ROUNDS]:
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
            self._committed = (self._state_key, settlement)
        statuses = settlement.statuses | {str(self.peer_id): settlement.status()}
        return RoundResult(
            cut=runner.cut if whole else None,
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
                "encode": runner.encode_seconds,
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
            patience=self.next_chunk_timeout,
        )
        settlement = Settlement(
            group_id=group_info.group_id,
            me=self.peer_id,
            members=runner.members,
            listening=runner.reducers,
            cut=runner.cut,
            store=self.store,
            said={"samples": int(samples), "loss": loss},
            stub_of=self._stub,
            traffic=self.traffic,
            patience=3 * self.next_chunk_timeout,  # a reducer waits for its senders, its members for it
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

    async def _fetch_average(self, donors: Sequence[str], state_key: str, future: MPFuture) -> None:
        def count(size: int) -> None:
            self.traffic[1] += size

        found = None
        try:
            for donor in donors:
                try:
                    stub = self._stub(PeerID.from_base58(donor))
                    cut = await fetch_whole(stub, state_key, self.store, self.next_chunk_timeout, count)
                except Exception as error:  # a donor may fail in any way; the next one is asked
                    logger.info(f"fetching the average from {donor} failed: {error!r}")
                    continue
                if cut is not None:
                    found = (donor, cut)
                    return
        finally:
            if not future.done():
                future.set_result(found)


def _disputed(runner: Runner, agreement: Agreement) -> frozenset[str]:
    """Reducers of parts about which members disagree, but for this peer."""
    reducers = {runner.reducers[runner.cut.parts[index].reducer] for index in agreement.disputed}
    return frozenset(str(reducer) for reducer in reducers if reducer != runner.me)


def _problem(runner: Runner, agreement: Agreement, received: float) -> str:
    if agreement.disputed:
        return f"members hold unlike bytes of {len(agreement.disputed)} parts of the average"
    part = math.floor(received * 1000) / 10
    reasons = "; ".join(f"{peer}: {why}" for peer, why in runner.failed.items())
    return f"only {part} % of the average arrived ({reasons or 'a reducer left'}), and no member has the rest"

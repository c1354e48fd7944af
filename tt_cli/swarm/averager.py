"""hivemind's averager, with rounds that either give every member the same average or none.

What is ours: members are matched by the state they hold (epoch and digest are part of the group's key, so unlike
peers never meet), a group starts as soon as the expected members are there, the local gradient survives a failed
round, and a peer's state is fetched from named donors with a size limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import as_aiter, azip

from tt_cli.run import RunConfig
from tt_cli.swarm.codec import codec_of
from tt_cli.swarm.handover import receive_state
from tt_cli.swarm.runner import Runner

logger = get_logger(__name__)

POLL_SECONDS = 0.1
MAX_WEIGHT_IN_TARGETS = 4


@dataclass(frozen=True)
class RoundResult:
    """How one all-reduce went, as this member saw it.

    members: peer id → what it said about itself when it joined (samples, loss …). received: 0 to 1.
    rejected: peer id → why what it sent was refused. failed: members whose parts of the average did not come.
    complete: the average in `Averager.average` is whole and finite, this peer may step.
    """

    complete: bool
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: float = 0.0
    rejected: dict[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    problem: str = ""
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0

    def samples_and_loss(self) -> tuple[int, float | None]:
        """Samples of all members and their mean loss, from what they said when they joined."""
        samples, total = 0, 0.0
        for said in self.members.values():
            count, loss = said.get("samples"), said.get("loss")
            if isinstance(count, int) and isinstance(loss, float) and count > 0 and math.isfinite(loss):
                samples, total = samples + count, total + loss
        return samples, total / samples if samples else None


class StateKeyManager(GroupKeyManager):
    """Groups form under a key that names the members' epoch and state, instead of random buckets."""

    def __init__(self, dht: DHT, prefix: str):
        super().__init__(dht, prefix, initial_group_bits="", target_group_size=None)
        self.state_key = ""
        self.avoided: frozenset[str] = frozenset()
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
        """The key follows the state alone."""


class Averager(DecentralizedAverager):
    """The process that speaks for this peer in averaging rounds and hands out its state.

    local: shared fp32 tensors with this peer's mean gradient. average: shared tensors of the same shapes that
    receive the group's average, untouched unless the round was complete.
    state_of: called in the host process when another peer asks for the state: (metadata, uint8 tensor (bytes,)).
    """

    def __init__(
        self,
        run: RunConfig,
        dht: DHT,
        local: Sequence[torch.Tensor],
        state_of: Callable[[], tuple[dict[str, Any], torch.Tensor]],
        *,
        client_mode: bool,
        max_state_bytes: int,
    ):
        self.average = tuple(torch.zeros_like(tensor).share_memory_() for tensor in local)
        self.traffic = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.codec = codec_of(run)
        self.max_weight = float(MAX_WEIGHT_IN_TARGETS * run.swarm.target_batch_size)
        self.max_state_bytes = max_state_bytes
        self._state_of = state_of
        self._avoided: frozenset[str] = frozenset()
        super().__init__(
            averaged_tensors=local,
            dht=dht,
            start=True,
            prefix=run.identity,
            min_matchmaking_time=run.swarm.matchmaking_time,
            request_timeout=run.swarm.matchmaking_time * 0.8,
            allreduce_timeout=run.swarm.averaging_timeout,
            next_chunk_timeout=run.swarm.next_chunk_timeout,
            compression=self.codec,
            client_mode=client_mode,
            allow_state_sharing=not client_mode,
            shutdown_timeout=2,
        )

    # ---------------------------------------------------------------- in the host process

    def run_round(
        self,
        state_key: str,
        expected: int,
        weight: float,
        about_me: dict[str, Any],
        timeout: float,
        avoided: Sequence[str] = (),
    ) -> RoundResult:
        """Find the members that hold the same state and average with them. Never raises for the swarm's faults.

        state_key: epoch and digest. expected: members that should come, this peer included; the group starts when
        they are there, else after the matchmaking time with those who came. weight: samples behind `local`.
        timeout: seconds to find a group. avoided: peer ids with which no group is formed.
        """
        started = time.monotonic()
        self._outer_pipe.send(("_prepare_round", [state_key, expected, tuple(avoided)], {}))
        weight = min(weight, self.max_weight)  # more piles up while rounds fail; the others would refuse it
        control = self.step(gather=about_me, weight=weight, timeout=timeout, allow_retries=False, wait=False)
        limit = timeout + (self._allreduce_timeout or 0.0) + 10.0
        try:
            result: RoundResult = control.result(timeout=limit)
        except Exception as error:  # hivemind passes on whatever broke in the averager's process
            if not control.done():
                control.cancel()
            words = str(error) or type(error).__name__
            return RoundResult(complete=False, problem=words, matchmaking_seconds=time.monotonic() - started)
        return result

    def download(self, donors: Sequence[str], timeout: float) -> tuple[str, dict[str, Any], torch.Tensor] | None:
        """State from the first donor that gives one: (donor, metadata, uint8 tensor), unchecked. None: nobody did.

        timeout: seconds for the whole download.
        """
        future: MPFuture = MPFuture()
        ids = [PeerID.from_base58(donor).to_bytes() for donor in donors]
        self._outer_pipe.send(("_download", [ids, future], {}))
        try:
            return future.result(timeout=timeout)
        except TimeoutError:
            return None

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], None]:
        """Called by hivemind in the host process for each request."""
        metadata, blob = self._state_of()
        return metadata, [blob], None

    # ---------------------------------------------------------------- in the averager's process

    def _run_internal(self) -> None:
        torch.set_num_threads(1)
        super()._run_internal()

    async def _prepare_round(self, state_key: str, expected: int, avoided: Sequence[str]) -> None:
        matchmaking = self._matchmaking
        if not isinstance(matchmaking.group_key_manager, StateKeyManager):
            matchmaking.group_key_manager = StateKeyManager(self.dht, self.prefix)
        matchmaking.group_key_manager.state_key = state_key
        matchmaking.group_key_manager.avoided = self._avoided = frozenset(avoided)
        matchmaking.target_group_size = max(2, expected)
        matchmaking.potential_leaders.target_group_size = max(2, expected)
        self._round_started = time.monotonic()

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As hivemind's, but who spoiled a round is not taken into the next one."""
        if str(context.remote_id) in self._avoided:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> RoundResult:
        """One all-reduce in a group that has just been assembled."""
        grouped = time.monotonic()
        try:
            bandwidths, modes, members = self._read_gathered(group_info)
            if spoilers := self._avoided.intersection(map(str, members)):
                raise ValueError(f"the group includes {', '.join(sorted(spoilers))}, who spoiled a round")
            fractions = await asyncio.get_running_loop().run_in_executor(
                None, load_balance_peers, self.total_size, bandwidths, min_vector_size
            )
            kwargs.pop("compression", None)
            runner = Runner(
                p2p=self._p2p,
                servicer_type=type(self),
                prefix=self.prefix,
                tensors=self._averaged_tensors,
                group_id=group_info.group_id,
                ordered_peer_ids=group_info.peer_ids,
                peer_fractions=fractions,
                modes=modes,
                codec=self.codec,
                max_weight=self.max_weight,
                traffic=self.traffic,
                **kwargs,
            )
            self._running_groups[group_info.group_id].set_result(runner)
            outputs = [output async for output in runner]
        except Exception as error:
            raise MatchmakingException(f"all-reduce failed: {error}") from error
        complete = runner.received_fraction == 1.0
        if complete:
            async for target, output in azip(as_aiter(*self.average), as_aiter(*outputs)):
                target.copy_(output)
        return RoundResult(
            complete=complete,
            members={str(peer): said for peer, said in members.items()},
            received=runner.received_fraction,
            rejected=dict(runner.rejected),
            failed=tuple(runner.failed),
            problem="" if complete else _incomplete(runner),
            matchmaking_seconds=grouped - self._round_started,
            averaging_seconds=time.monotonic() - grouped,
        )

    def _read_gathered(
        self, group_info: GroupInfo
    ) -> tuple[list[float | None], tuple[AveragingMode, ...], dict[PeerID, dict[str, Any]]]:
        """What the members said when they joined, checked. Raises ValueError or TypeError for nonsense."""
        bandwidths: list[float | None] = []
        modes: list[AveragingMode] = []
        members: dict[PeerID, dict[str, Any]] = {}
        for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
            _, mode_id, user_data = self.serializer.loads(data)
            said = self.serializer.loads(user_data)
            if not isinstance(said, dict):
                raise TypeError(f"{peer} did not say who it is")
            mode = AveragingMode(mode_id)
            modes.append(mode)
            bandwidths.append(0.0 if mode == AveragingMode.CLIENT else None)
            members[peer] = said
        return bandwidths, tuple(modes), members

    async def _download(self, donors: Sequence[bytes], future: MPFuture) -> None:
        try:
            for donor in map(PeerID, donors):
                try:
                    found = await self._download_from(donor)
                except Exception as error:  # a donor may fail in any way; the next one is asked
                    logger.warning(f"state download from {donor} failed: {error!r}")
                    continue
                if found is not None:
                    future.set_result((str(donor), *found))
                    return
        finally:
            if not future.done():
                future.set_result(None)

    async def _download_from(self, donor: PeerID) -> tuple[dict[str, Any], torch.Tensor] | None:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())

        def count(size: int, total: int) -> None:
            self.traffic[1] += size

        return await receive_state(
            stream, max_bytes=self.max_state_bytes, chunk_timeout=self.next_chunk_timeout, on_bytes=count
        )


def _incomplete(runner: Runner) -> str:
    part = math.floor(runner.received_fraction * 1000) / 10
    reasons = "; ".join(f"{peer}: {why}" for peer, why in runner.failed.items())
    return f"only {part} % of the average arrived ({reasons or 'a reducer left'})"

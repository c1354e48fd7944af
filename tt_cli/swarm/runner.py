"""One all-reduce in which every member receives the same bytes.

hivemind's runner sends each member its own quantised *difference* from the average, so members end with unlike
tensors and drift apart. Here the reducer of a part encodes the average once, sends those bytes to all, and uses
their decoded form itself: whoever received everything holds exactly what the others hold. What comes in is
checked before it changes anything.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer
from hivemind.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, attach_event_on_finished

from tt_cli.swarm.codec import MalformedPart, decode_part, is_finite

logger = get_logger(__name__)


class Reducer(TensorPartReducer):
    """Averages the parts that this peer is responsible for; refuses what must not enter the average.

    max_weight: the largest weight (samples) a member may claim for itself.
    """

    def __init__(self, part_shapes: Sequence[torch.Size], num_senders: int, max_weight: float):
        super().__init__(part_shapes, num_senders)
        self.max_weight = max_weight
        self._weights: dict[int, float] = {}

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """As hivemind's; raises MalformedPart before any counter or sum has changed."""
        if not 0 <= part_index < self.num_parts:
            raise MalformedPart(f"part {part_index} of {self.num_parts}")
        if not math.isfinite(weight) or not 0.0 <= weight <= self.max_weight:
            raise MalformedPart(f"weight {weight} outside 0 to {self.max_weight:g}")
        if self._weights.setdefault(sender_index, weight) != weight:
            raise MalformedPart("a weight that changes between parts")
        if tensor_part.shape != self.part_shapes[part_index]:
            raise MalformedPart(f"shape {tuple(tensor_part.shape)}")
        if not is_finite(tensor_part):
            raise MalformedPart("values that are not finite")
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


class Runner(AllReduceRunner):
    """hivemind's butterfly all-reduce with equal results for all. Yields averages, not differences.

    codec: encodes both directions. traffic: int64 tensor (2,), bytes sent and received, counted up.
    rejected: peer id → why its parts were refused. failed: reducer → why its averages did not come.
    """

    def __init__(self, *, codec: CompressionBase, max_weight: float, traffic: torch.Tensor, **kwargs: Any):
        super().__init__(compression=codec, **kwargs)
        self.codec, self.traffic = codec, traffic
        self.rejected: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.tensor_part_container.return_deltas = False
        self.tensor_part_reducer.finished.set()  # hivemind's own, replaced unused: it would warn of missing parts
        self.tensor_part_reducer: Reducer = Reducer(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            max_weight,
        )
        own_index = self.ordered_peer_ids.index(self.peer_id)
        container = self.tensor_part_container
        self._shapes = [[part.shape for part, _ in parts] for parts in container._input_parts_by_peer]
        self._infos: list[CompressionInfo] = [info for _, info in container._input_parts_by_peer[own_index]]
        self._encoded: dict[int, asyncio.Task[runtime_pb2.Tensor]] = {}

    @property
    def received_fraction(self) -> float:
        """How much of the averaged tensors arrived from their reducers, 0 to 1."""
        container = self.tensor_part_container
        return 1.0 - container.failed_size / container.total_size

    async def _encode(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        """The one encoding of an averaged part, whoever asks first."""
        if part_index not in self._encoded:
            self._encoded[part_index] = asyncio.create_task(self._encode_once(part_index, average))
        return await asyncio.shield(self._encoded[part_index])

    async def _encode_once(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        if not is_finite(average):
            raise AllreduceException("the average is not finite")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self.codec.compress, average, self._infos[part_index])

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        """Send this peer's share of the local tensors to one reducer and take its averages, checked."""
        peer_index = self.ordered_peer_ids.index(peer_id)
        try:
            if peer_id == self.peer_id:
                await self._reduce_own(peer_index)
            else:
                await self._exchange(peer_id, peer_index)
        except BaseException as error:
            if isinstance(error, MalformedPart):
                self.rejected[str(peer_id)] = f"sent back {error}"
            if isinstance(error, Exception):
                self.failed[str(peer_id)] = str(error) or type(error).__name__
                logger.warning(f"the exchange with reducer {peer_id} failed: {error!r}")
            self.tensor_part_container.register_failed_reducer(peer_index)
            raise

    async def _reduce_own(self, peer_index: int) -> None:
        sender_index = self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(sender_index, part_index, part, self.weight)
            decoded = deserialize_torch_tensor(await self._encode(part_index, average))
            self.tensor_part_container.register_processed_part(peer_index, part_index, decoded)

    async def _exchange(self, peer_id: PeerID, peer_index: int) -> None:
        shapes = self._shapes[peer_index]
        done_sending = asyncio.Event()
        inputs = attach_event_on_finished(self._generate_input_for_peer(peer_index), done_sending)
        stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._count_sent(inputs))
        if self.should_delay_results(self.peer_id):
            await done_sending.wait()

        def decode(numbered: tuple[int, averaging_pb2.AveragingData]) -> torch.Tensor:
            part_index, message = numbered
            if message.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"{peer_id} answered {averaging_pb2.MessageCode.Name(message.code)}")
            if part_index >= len(shapes):
                raise MalformedPart("more parts than it averages")
            return decode_part(message.tensor_part, shapes[part_index])

        part_index = 0
        answers = self._count_received(aiter_with_timeout(stream, self.reducer_timeout))
        async for average in amap_in_executor(decode, answers, max_prefetch=self.tensor_part_container.prefetch):
            self.tensor_part_container.register_processed_part(peer_index, part_index, average)
            part_index += 1
        if part_index != len(shapes):
            raise AllreduceException(f"{peer_id} sent {part_index} of {len(shapes)} parts")

    async def _count_sent(
        self, inputs: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in inputs:
            self.traffic[0] += len(message.tensor_part.buffer)
            yield message

    async def _count_received(
        self, messages: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[tuple[int, averaging_pb2.AveragingData]]:
        part_index = 0
        async for message in messages:
            self.traffic[1] += len(message.tensor_part.buffer)
            yield part_index, message
            part_index += 1

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Take one sender's parts, checked; answer each with the encoded average that all members get."""
        reducer, sender = self.tensor_part_reducer, self.sender_peer_ids[sender_index]

        def decode(numbered: tuple[int, averaging_pb2.AveragingData]) -> tuple[torch.Tensor, float]:
            part_index, message = numbered
            if part_index >= reducer.num_parts:
                raise MalformedPart("more parts than it was asked for")
            return decode_part(message.tensor_part, reducer.part_shapes[part_index]), message.weight

        part_index = 0
        try:
            async for part, weight in amap_in_executor(
                decode, self._count_received(stream), max_prefetch=self.tensor_part_container.prefetch
            ):
                try:
                    average = await reducer.accumulate_part(sender_index, part_index, part, weight=weight)
                except BannedException:
                    break
                encoded = await self._encode(part_index, average)
                part_index += 1
                self.traffic[0] += len(encoded.buffer)
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=encoded)
        except Exception as error:
            if isinstance(error, MalformedPart):
                self.rejected[str(sender)] = f"sent {error}"
            logger.warning(f"taking parts from {sender} failed after {part_index} of {reducer.num_parts}: {error!r}")
            raise
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(sender)

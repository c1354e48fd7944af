"""One peer's state on its way to another: what arrives is bounded and plain bytes before anything decodes it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import Any

import torch
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.streaming import combine_from_streaming


async def receive_state(
    stream: AsyncIterable[averaging_pb2.DownloadData],
    *,
    max_bytes: int,
    chunk_timeout: float,
    on_bytes: Callable[[int, int], None],
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """What a donor answers to `rpc_download_state`: (metadata, uint8 tensor (bytes,)), unchecked; None: it has none.

    chunk_timeout: seconds to wait for each part. on_bytes: called with the bytes of each part, and the bytes that
    the donor says the state has. Raises ValueError for more than `max_bytes` or another form than plain bytes.
    """
    parts: list[runtime_pb2.Tensor] = []
    metadata, received = None, 0
    async for message in aiter_with_timeout(stream, timeout=chunk_timeout):
        if message.metadata:
            metadata = MSGPackSerializer.loads(message.metadata)
        if message.tensor_part.dtype and parts:
            raise ValueError("more than one tensor")
        parts.append(message.tensor_part)
        received += len(message.tensor_part.buffer)
        if received > max_bytes:
            raise ValueError(f"more than the {max_bytes} bytes that a state may have")
        on_bytes(len(message.tensor_part.buffer), parts[0].size[0] if parts[0].size else 0)
    if not isinstance(metadata, dict) or not parts:
        return None
    whole = combine_from_streaming(parts)
    form = (whole.compression, whole.dtype, list(whole.size))
    if form != (runtime_pb2.NONE, "uint8", [len(whole.buffer)]):  # hivemind's decoders trust the header
        raise ValueError(f"{whole.dtype[:20]!r} of shape {list(whole.size)[:4]} instead of plain bytes")
    return metadata, deserialize_torch_tensor(whole)

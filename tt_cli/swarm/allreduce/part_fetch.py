"""Parts of an average from a member that has them: asking, and answering.

A request names the round by its group or by the state that it started from, and the parts, or None for all. The answer
begins with the shares of the reducers, which give the cut, the hashes of all parts, and the votes that were signed for
them; then come the parts, as they travelled in the round. What does not fit its hash or is no part of this run is
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import torch
from hivemind.proto import runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, MISSING, AverageBuffer, part_hash
from tt_cli.swarm.allreduce.messages import average_hash
from tt_cli.swarm.compression.codec import MalformedPart


def request(key: bytes | str, parts: Iterable[int] | None) -> runtime_pb2.ExpertInfo:
    """key: group id, or the state key of a round that was committed."""
    return wire.PARTS_REQUEST.message((key, None if parts is None else tuple(parts)))


async def answer(
    store: AverageBuffer, parts: Iterable[int] | None, holds: Callable[[], bool]
) -> AsyncIterator[runtime_pb2.ExpertInfo]:
    """The messages that a member sends. They end early when `holds` says that the store went on to another round."""
    hashes = store.hashes
    yield wire.AVERAGE_HEADER.message((store.shares, b"".join(hashes), store.votes))
    for index in range(len(hashes)) if parts is None else parts:
        if not holds() or index >= len(hashes) or hashes[index] == MISSING:
            return
        yield runtime_pb2.ExpertInfo(serialized_info=store.get(index))


async def fetch_parts(
    stub: Any,
    key: bytes | str,
    store: AverageBuffer,
    wanted: Mapping[int, bytes] | None,
    patience: float,
    traffic: torch.Tensor,
    check: Callable[[bytes, Sequence[bytes]], None] = lambda average, votes: None,
) -> bool:
    """Put the parts `wanted` (index → hash) into the store, or instead of what is in it, None, a whole average.

    False when this member does not have it all. traffic: see `RoundGroup`. check: is told a whole average's hash, and
    signed votes for it, before it comes; what it raises ends the fetch. Raises ValueError for what does not fit,
    LookupError where the store goes on to another average, and whatever the connection raises.
    """
    held, indexes = store.hashes, None if wanted is None else sorted(wanted)
    # a stream to who fell silent may take minutes to open
    async with aclosing(await asyncio.wait_for(stub.rpc_fetch_average(request(key, indexes)), patience)) as answers:
        stream = aiter_with_timeout(answers, patience)
        with contextlib.suppress(StopAsyncIteration):
            header = await anext(stream)
            if wanted is None:
                shares, hashes, votes = _read_header(header, store)
                check(average_hash(shares, hashes), votes)
                held, wanted = store.open(shares), dict(enumerate(hashes))
            for index in sorted(wanted):
                encoded = (await anext(stream)).serialized_info
                traffic[1] += len(encoded)
                if part_hash(encoded) != wanted[index]:
                    raise MalformedPart(f"part {index} with another hash than was said")
                part = store.parts[index]
                store.codec.check_part(encoded, part.elements, part.large)
                store.put(index, encoded, held)
            return True
    return False


def _read_header(
    header: runtime_pb2.ExpertInfo, store: AverageBuffer
) -> tuple[tuple[int, ...], list[bytes], tuple[bytes, ...]]:
    shares, joined, votes = wire.AVERAGE_HEADER.read(header)
    if len(joined) != HASH_BYTES * len(store.layout.parts(shares)):
        raise ValueError("hashes of another cut")
    return shares, [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)], votes

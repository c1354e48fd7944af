"""A taker's stream to one donor: what it asks, and what it takes for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from typing import Protocol

from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from tt_cli.swarm import wire
from tt_cli.swarm.state.server import StateServer

Connect = Callable[[str], AbstractAsyncContextManager["DonorStream"]]
"""Donor's peer id → a stream to it."""


class DonorRefused(Exception):
    """A donor sent what no honest one sends: it is not asked again."""


class DonorStream(Protocol):
    """Requests to one donor, and its answers."""

    async def ask(self, request: bytes) -> None:
        """Send one request."""

    async def answer(self) -> bytes | None:
        """Its next answer; None when it hung up, or its connection broke."""


def connect_over(p2p: P2P, namespace: str) -> Connect:
    """Connect to donors of a run through this libp2p node. namespace: the run's identity."""

    @asynccontextmanager
    async def connect(donor: str) -> AsyncIterator[DonorStream]:
        handler = StateServer._get_handle_name(namespace, StateServer.rpc_state_chunks.__name__)
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(donor), handler)
        with closing(writer):
            yield _LibP2PStream(reader, writer)

    return connect


class _LibP2PStream:
    """hivemind's own stubs wait for the last request to be sent before they say that the other side hung up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes) -> None:
        with suppress(ConnectionError):  # what it sent before can be read still; then `answer` says that it hung up
            await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=request), self._writer)

    async def answer(self) -> bytes | None:
        try:
            message, error = await P2P.receive_protobuf(runtime_pb2.ExpertInfo, self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if message is None:
            raise ValueError(f"it failed: {error.message}")
        data: bytes = message.serialized_info
        return data


def request_of(digest: str, chunks: Sequence[int]) -> bytes:
    """Ask for the state with this digest, and these of its chunks (in rising order), as runs [first, last + 1, …]."""
    runs: list[int] = []
    for index in chunks:
        if runs and runs[-1] == index:
            runs[-1] = index + 1
        else:
            runs += [index, index + 1]
    return wire.STATE_REQUEST.pack((digest, tuple(runs)))

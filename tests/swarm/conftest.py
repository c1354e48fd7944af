"""libp2p nodes that the tests of a file use one after the other: a daemon takes half a second to start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hivemind.p2p import P2P

LONGEST = 60.0  # seconds of a test


class Libp2p:
    """An event loop, and nodes in it that all know the first one."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._nodes: list[P2P] = []
        self._free: list[P2P] = []

    def run(self, test: Coroutine[Any, Any, Any]) -> None:
        self._runner.run(asyncio.wait_for(test, LONGEST))

    @asynccontextmanager
    async def node(self) -> AsyncIterator[P2P]:
        """One that nobody uses; afterwards it is as it was before."""
        node = self._free.pop(0) if self._free else await self._start()
        holders = node, node._client, node._client.control
        before = [dict(vars(holder)) for holder in holders]
        try:
            yield node
        finally:
            for holder, attributes in zip(holders, before, strict=True):
                vars(holder).clear()
                vars(holder).update(attributes)
            if node._child.returncode is None:
                await self._clear(node)
                self._free = sorted([*self._free, node], key=self._nodes.index)

    async def _start(self) -> P2P:
        known = await self._nodes[0].get_visible_maddrs() if self._nodes else None
        self._nodes.append(
            await P2P.create(initial_peers=known, host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="server")
        )
        return self._nodes[-1]

    @staticmethod
    async def _clear(node: P2P) -> None:
        control = node._client.control
        for name in list(control.handlers):
            await node.remove_binary_stream_handler(name)
        for name in list(control.unary_handlers):
            await node._client.remove_unary_handler(name)

    def end(self) -> None:
        async def shut_down() -> None:
            async with AsyncExitStack() as stack:
                for node in self._nodes:
                    stack.push_async_callback(node.shutdown)

        self._runner.run(shut_down())
        self._runner.close()


@pytest.fixture(scope="module")
def libp2p() -> Iterator[Libp2p]:
    nodes = Libp2p()
    yield nodes
    nodes.end()

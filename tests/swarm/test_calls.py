"""Calls over real libp2p nodes that are given up: what becomes of the calls after them, and of who was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.proto.dht_pb2 import PingRequest, PingResponse
from swarm.conftest import Libp2p

from tt_cli.swarm import hivemind_patches

SHORT, LONG = 0.05, 30.0  # seconds


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Before the first node of this file begins."""
    before = p2pclient.ControlClient
    hivemind_patches.apply()
    yield
    p2pclient.ControlClient = before


class Service(ServicerBase):
    """One call that is answered as this process stands still for a while, and one that is never answered."""

    async def rpc_ping(self, request: PingRequest, context: P2PContext) -> PingResponse:
        if request.validate:
            self.standing = asyncio.create_task(self.stand_still())
        return PingResponse()

    async def stand_still(self) -> None:
        for _ in range(3):  # until the answer is on its way
            await asyncio.sleep(0)
        time.sleep(4 * SHORT)

    async def rpc_find(self, request: PingRequest, context: P2PContext) -> PingResponse:
        await asyncio.Event().wait()
        return PingResponse()


async def given_up(stub: Service, request: PingRequest) -> bool:
    try:
        async with asyncio.timeout(SHORT):
            await stub.rpc_ping(request)
    except TimeoutError:
        return True
    return False


async def stub_of(asking: P2P, asked: P2P) -> Service:
    await Service().add_p2p_handlers(asked)
    stub: Service = Service.get_stub(asking, asked.peer_id)
    await asyncio.wait_for(stub.rpc_ping(PingRequest()), LONG)
    return stub


def test_an_answer_that_comes_as_its_call_is_given_up_ends_no_other_call(libp2p: Libp2p) -> None:
    """A process that stood still finds both at once, the end of its patience and the answer."""

    async def test() -> None:
        async with libp2p.node() as asked, libp2p.node() as asking:
            stub = await stub_of(asking, asked)
            while not await given_up(stub, PingRequest(validate=True)):
                pass
            await asyncio.wait_for(stub.rpc_ping(PingRequest()), LONG)

    libp2p.run(test())


def test_calls_that_are_given_up_take_no_place_where_they_are_answered(libp2p: Libp2p) -> None:
    async def test() -> None:
        async with libp2p.node() as asked, libp2p.node() as asking:
            stub = await stub_of(asking, asked)
            answering = asked._client.control._handler_tasks
            calls = [asyncio.create_task(stub.rpc_find(PingRequest())) for _ in range(20)]
            while len(answering) < len(calls):
                await asyncio.sleep(0.001)
            for call in calls:
                call.cancel()
            while answering:
                await asyncio.sleep(0.001)
            assert not asking._client.control._pending_calls
            await asyncio.wait_for(stub.rpc_ping(PingRequest()), LONG)

    libp2p.run(test())

"""What a stranger may do with a stream, over real libp2p nodes; and what is counted for each peer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import pytest
from hivemind.p2p import P2P, P2PContext, P2PHandlerError, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from swarm.conftest import Libp2p
from swarm.joins import join_of
from swarm.made import SteppedClock
from swarm.rounds import NAME, SIGNERS
from testbed.passes import Issuer, key_file

from tt_cli.identity.passes import MAX_PASS
from tt_cli.identity.rate_limit import Crowded, Places, RateLimit
from tt_cli.run import load_run
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.allreduce.messages import SignedVote
from tt_cli.swarm.allreduce.rendezvous import entry_of, read_entry
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, MAX_REDUCERS
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.pass_guard import frame
from tt_cli.swarm.network import stream_limits

pytestmark = pytest.mark.slow

NAMESPACE, LONG = "run", 40.0


class Service(ServicerBase):
    """Two doors: one request and its answer, and many of both."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.gone, self.flooded = asyncio.Event(), asyncio.Event()

    async def rpc_fetch_average(
        self, request: runtime_pb2.ExpertInfo, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        self.served.append(len(request.serialized_info))
        try:
            for _ in range(64):
                yield runtime_pb2.ExpertInfo(serialized_info=bytes(2**20))
        finally:
            self.gone.set()

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        join, votes = read_entry(request.gather)
        others = [entry_of(join)] * (len(votes) - 1)
        yield averaging_pb2.MessageFromLeader(gathered=[*others, entry_of(join, votes)])

    async def rpc_accuse(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        async for _ in requests:
            await self.flooded.wait()
            raise ValueError("one was enough")
        yield runtime_pb2.ExpertInfo()

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        async for request in requests:
            self.served.append(len(request.serialized_info))
            yield runtime_pb2.ExpertInfo(serialized_info=b"ok")


def handlers_of(service: Service) -> list[Any]:
    service._collect_rpc_handlers()
    return service._rpc_handlers or []


Stream = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def served(
    libp2p: Libp2p, service: Service, use: Callable[[Stream], Awaitable[None]], membership: type[Admission] = Admission
) -> None:
    """Have a stranger use a guarded service: it opens streams to a method."""

    async def test() -> None:
        async with libp2p.node() as serving, libp2p.node() as stranger:
            stream_limits.guard(serving, membership(load_run("emoji")), MAX_MEMBERS)
            assert all(handler.stream_output for handler in handlers_of(service))
            await service.add_p2p_handlers(serving, namespace=NAMESPACE)

            async def opened(
                method: str, shown: bytes = frame("")
            ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                handler = Service._get_handle_name(NAMESPACE, method)
                _, reader, writer = await stranger.call_binary_stream_handler(serving.peer_id, handler)
                writer.write(shown)
                return reader, writer

            await use(opened)

    libp2p.run(test())


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    before = P2P.receive_protobuf, P2P.send_raw_data
    hivemind_patches.apply()
    yield
    P2P.receive_protobuf, P2P.send_raw_data = map(staticmethod, before)


def header(size: int) -> bytes:
    return P2P.MESSAGE_MARKER + size.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Returns when the other side closes the stream, whatever it sends before."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while await asyncio.wait_for(reader.read(2**16), LONG):
            pass


@pytest.mark.parametrize(
    ("method", "size"),
    [
        *(("rpc_state_chunks", size) for size in (2**21, 2**40, 2**64 - 1)),
        *(("rpc_fetch_average", 2**16 + 1), ("rpc_join_group", 2**21)),
    ],
)
def test_a_larger_declared_size_than_of_a_request_ends_the_stream(method: str, size: int, libp2p: Libp2p) -> None:
    service = Service()

    async def use(opened: Stream) -> None:
        reader, writer = await opened(method)
        writer.write(header(size))
        await writer.drain()
        await hung_up(reader)
        assert service.served == []

    served(libp2p, service, use)


LATE = frame("") + header(100) + bytes(50)


@pytest.mark.parametrize("sent", [LATE[:length] for length in (0, 1, 3, 5, 11, 61)], ids=len)
def test_who_sends_a_request_drop_by_drop_is_hung_up_on(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, libp2p: Libp2p
) -> None:
    monkeypatch.setattr(stream_limits, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(hivemind_patches, "PIECE_SECONDS", 0.3)

    async def use(opened: Stream) -> None:
        reader, writer = await opened("rpc_fetch_average", sent)
        await writer.drain()
        await hung_up(reader)

    served(libp2p, Service(), use)


@pytest.mark.parametrize("members", [16, 256])
def test_who_is_locked_shows_the_votes_of_a_large_group_and_is_told_those_of_all(members: int, libp2p: Libp2p) -> None:
    cut = tuple(range(2**16 - 1, 2**16 - 1 - min(members, MAX_REDUCERS), -1))
    vote = SignedVote(NAME, SIGNERS[0].peer_id, 1, cut, (bytes(32),)).sign(SIGNERS[0])
    joining = entry_of(join_of(pass_text="x" * MAX_PASS).sign(SIGNERS[0]), [vote] * members)

    async def use(opened: Stream) -> None:
        reader, writer = await opened("rpc_join_group")
        await P2P.send_protobuf(averaging_pb2.JoinRequest(gather=joining), writer)
        await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
        group, _ = await asyncio.wait_for(P2P.receive_protobuf(averaging_pb2.MessageFromLeader, reader), LONG)
        assert group is not None and len(group.gathered) == members
        assert sum(len(read_entry(entry)[1]) for entry in group.gathered) == members

    served(libp2p, Service(), use)


def test_who_takes_no_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, libp2p: Libp2p) -> None:
    monkeypatch.setattr(hivemind_patches, "PIECE_SECONDS", 0.3)
    service = Service()

    async def use(opened: Stream) -> None:
        _, writer = await opened("rpc_fetch_average")
        await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=b"x"), writer)
        await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
        await service.gone.wait()  # nothing is read here meanwhile

    served(libp2p, service, use)


def test_who_goes_on_sending_after_the_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, libp2p: Libp2p) -> None:
    """However full the buffers are, which nobody reads any more."""
    monkeypatch.setattr(stream_limits, "LINGER_SECONDS", 0.3)
    service = Service()

    async def use(opened: Stream) -> None:
        reader, writer = await opened("rpc_accuse")
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.5):
                    await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=bytes(2**16)), writer)
        service.flooded.set()
        await hung_up(reader)

    served(libp2p, service, use)


def test_one_peer_holds_some_streams_and_no_more(monkeypatch: pytest.MonkeyPatch, libp2p: Libp2p) -> None:
    monkeypatch.setattr(stream_limits, "EACH", 3)

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=b"x"), writer)
            found, _ = await P2P.receive_protobuf(runtime_pb2.ExpertInfo, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            return False
        return found is not None and found.serialized_info == b"ok"

    async def use(opened: Stream) -> None:
        held = [await opened("rpc_state_chunks") for _ in range(3)]
        assert [await answered(*one) for one in held] == [True] * 3
        assert not await answered(*await opened("rpc_state_chunks"))
        _, writer = held.pop()
        writer.close()
        while not await answered(*await opened("rpc_state_chunks")):
            await asyncio.sleep(0.05)  # until the other side has seen that one is closed

    served(libp2p, Service(), use)


def test_who_joins_needs_no_place_among_other_streams(monkeypatch: pytest.MonkeyPatch, libp2p: Libp2p) -> None:
    """Each member of a large group holds a stream at its leader."""
    monkeypatch.setattr(stream_limits, "TOTAL", 1)

    async def use(opened: Stream) -> None:
        reader, writer = await opened("rpc_state_chunks")
        await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=b"x"), writer)
        await asyncio.wait_for(P2P.receive_protobuf(runtime_pb2.ExpertInfo, reader), LONG)
        await hung_up((await opened("rpc_state_chunks"))[0])
        joining, writer = await opened("rpc_join_group")
        await P2P.send_protobuf(averaging_pb2.JoinRequest(gather=entry_of(join_of().sign(SIGNERS[0]))), writer)
        await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
        group, _ = await asyncio.wait_for(P2P.receive_protobuf(averaging_pb2.MessageFromLeader, joining), LONG)
        assert group is not None

    served(libp2p, Service(), use)


class EveryoneBanned(Admission):
    def is_banned(self, peer_id: str) -> bool:
        return True


def test_a_banned_peer_gets_no_stream(libp2p: Libp2p) -> None:
    service = Service()

    async def use(opened: Stream) -> None:
        reader, writer = await opened("rpc_state_chunks")
        writer.write(header(10) + bytes(10))
        await hung_up(reader)
        assert service.served == []

    served(libp2p, service, use, EveryoneBanned)


def charged(rate: RateLimit, peer_id: str, cost: float = 1.0) -> bool:
    try:
        rate.charge(peer_id, cost)
    except Crowded:
        return False
    return True


def test_a_rate_is_each_peers_own() -> None:
    clock: Any = SteppedClock(0.0)
    rate = RateLimit(burst=5.0, per_second=2.0, clock=clock)
    assert [charged(rate, "a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert charged(rate, "b")
    clock.now += 1.0
    assert [charged(rate, "a") for _ in range(3)] == [True, True, False]
    clock.now += 1.0
    assert charged(rate, "a", 100.0), "how much an answer is shows when it is there"
    clock.now += 40.0
    assert not charged(rate, "a"), "and it is paid back before the next"
    clock.now += 20.0
    assert charged(rate, "a")
    rate = RateLimit(burst=1.0, per_second=0.5, most=2, clock=clock)
    assert [charged(rate, one) for one in "abac"] == [True, True, False, True]
    assert [charged(rate, one) for one in "ab"] == [False, True], "who was not heard of for longest is forgotten"
    clock.now += 1.0
    assert not charged(rate, "b"), "half of what it takes"


def test_places_are_given_back() -> None:
    places = Places(1, 2)
    with places.one("a"), places.one("b"):
        for peer_id in ("a", "b", "c"):
            with pytest.raises(Crowded), places.one(peer_id):
                pass
    with places.one("c"):
        pass
    assert not places._taken


# ------------------------------------------------------------------ passes


class Echo(ServicerBase):
    """One call, and one stream."""

    async def rpc_settle(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        return request

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        async for request in requests:
            yield request


@pytest.mark.parametrize("shown", ["its own", "none", "another's"])
def test_calls_and_streams_are_for_who_shows_its_pass(shown: str, tmp_path: Path) -> None:
    issuer = Issuer()
    run = issuer.closed(load_run("emoji"))
    keys = {}
    for name in ("anna", "ben"):
        issuer.admit(tmp_path / name, run, "trainer", name)
        keys[name] = key_file(tmp_path / name, run, "trainer")
    if shown == "none":
        keys["ben"].with_suffix(".pass").unlink()
    if shown == "another's":
        keys["ben"].with_suffix(".pass").write_text(keys["anna"].with_suffix(".pass").read_text())
    words = {"none": "no pass was shown", "another's": "issued to another peer"}.get(shown, "")
    message = runtime_pb2.ExpertInfo(serialized_info=b"hello")

    async def says() -> AsyncIterator[runtime_pb2.ExpertInfo]:
        yield message

    async def test() -> None:
        addresses: list[Any] = []
        nodes = []
        for key in keys.values():
            common = {"identity_path": str(key), "check_if_identity_free": False}
            nodes.append(await P2P.create(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], **common))
            addresses += await nodes[-1].get_visible_maddrs()
            stream_limits.guard(nodes[-1], Admission(run, key), MAX_MEMBERS)
        anna, ben = nodes
        try:
            await Echo().add_p2p_handlers(anna, namespace=NAMESPACE)
            stub = Echo.get_stub(ben, anna.peer_id, namespace=NAMESPACE)
            for _ in range(2):
                with pytest.raises(P2PHandlerError, match=words) if words else contextlib.nullcontext():
                    stream = await stub.rpc_state_chunks(says())
                    assert [answer.serialized_info async for answer in stream] == [b"hello"]
                with pytest.raises(P2PHandlerError, match=words) if words else contextlib.nullcontext():
                    assert (await stub.rpc_settle(message)).serialized_info == b"hello"
        finally:
            for node in nodes:
                await node.shutdown()

    asyncio.run(asyncio.wait_for(test(), LONG))

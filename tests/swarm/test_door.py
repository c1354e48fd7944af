"""The DHT's door, between real nodes of a closed run: who is answered, whom a member believes, and what is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from end_to_end.conftest import tiny_run
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PHandlerError, PeerID, ServicerBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from swarm.made import record
from testbed.passes import HOUR, Issuer, key_file

from tt_cli.identity.passes import Notice, RollBack, public_text, sign
from tt_cli.identity.rate_limit import Crowded, RateLimit
from tt_cli.swarm.membership import dht_auth as room
from tt_cli.swarm.membership.admission import Admission, NoPass, NotAdmitted, membership_at
from tt_cli.swarm.membership.control_notices import notice_key
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.membership.pass_guard import PassGuard, frame
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network.connectivity import UNSEEN, ConnectivityMonitor
from tt_cli.swarm.network.dht_node import DHT, addresses_of, start_dht, stop_dht
from tt_cli.swarm.observer import Observer
from tt_cli.swarm.records.peer_record import history_key, peers_key
from tt_cli.swarm.records.publisher import PeerDirectory, lives_of, read_records
from tt_cli.swarm.records.record_chain import ChainStorage

pytestmark = pytest.mark.slow


class Members:
    """A closed run, its issuer, and an auxiliary peer's node. start: one more node, with a pass unless it says so."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.issuer, self.stack = folder, Issuer(), stack
        self.run = self.issuer.closed(tiny_run(swarm={"statistics_expiration": 600.0}))
        self.aux, self.identity = self.start("aux", role="aux")
        self.addresses = addresses_of(self.aux)

    def start(self, name: str, role: str = "trainer", **more: Any) -> tuple[DHT, Identity]:
        self.issuer.admit(self.folder / name, self.run, role, name, **more)
        identity = claim_identity(key_file(self.folder / name, self.run, role).parent, role)
        known = self.addresses if name != "aux" else []
        dht = start_dht(self.run, identity, initial_peers=known, host="127.0.0.1", client_mode=role != "aux")
        self.stack.callback(stop_dht, dht)
        return dht, identity

    def lay_pass(self, name: str, text: str) -> Path:
        """A key, and this in the place of its pass."""
        self.issuer.admit(self.folder / name, self.run, "trainer", name)
        path = key_file(self.folder / name, self.run, "trainer").with_suffix(".pass")
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(tmp_path_factory.mktemp("members"), stack)


def publish(members: Members, dht: DHT, identity: Identity, **claims: object) -> None:
    board = PeerDirectory(members.run, dht, identity)
    board._store(record(identity.peer_id, **{"time": get_dht_time(), "epoch": 1, **claims}))


def test_members_see_each_other_by_the_names_in_their_passes(members: Members) -> None:
    dht, identity = members.start("anna")
    publish(members, dht, identity, user="somebody else")
    ben, _ = members.start("ben")
    assert {one.peer_id: one.user for one in read_records(ben, members.run)} == {identity.peer_id: "anna"}


def test_who_has_no_pass_is_told_before_it_asks_anybody(members: Members) -> None:
    members.lay_pass("nobody", "")
    identity = claim_identity(key_file(members.folder / "nobody", members.run, "trainer").parent, "trainer")
    with pytest.raises(NoPass, match="no pass was shown"):
        start_dht(members.run, identity, initial_peers=members.addresses, host="127.0.0.1")


@pytest.mark.parametrize(
    ("name", "words"), [("none", "no pass was shown"), ("anothers", "issued to another peer"), ("expired", "expired")]
)
def test_who_asks_all_the_same_is_refused(
    members: Members, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = key_file(members.folder / "aux", members.run, "aux").with_suffix(".pass").read_text()
    path = members.lay_pass(name, {"none": "", "anothers": text}.get(name, ""))
    if name == "expired":
        members.issuer.admit(members.folder / name, members.run, "trainer", name, lasts=-HOUR)
    monkeypatch.setattr("tt_cli.swarm.network.dht_node.check_own_pass", lambda *_: None)
    identity = claim_identity(path.parent, "trainer")
    with pytest.raises(NoPass, match=rf"{words}[^')]*$"):
        start_dht(members.run, identity, initial_peers=members.addresses, host="127.0.0.1")


def test_a_plain_node_finds_and_stores_nothing(members: Members) -> None:
    """As an observer of hivemind's own would: it signs nothing and shows nothing."""

    async def ask() -> list[str]:
        p2p = await P2P.create(initial_peers=members.addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client")
        peer = PeerID.from_base58(members.identity.peer_id)
        stub: Any = ServicerBase.get_stub.__func__(DHTProtocol, p2p, peer)  # type: ignore[attr-defined] # without a door
        requests = (
            (stub.rpc_ping, dht_pb2.PingRequest()),
            (stub.rpc_find, dht_pb2.FindRequest(keys=[DHTID.generate().to_bytes()])),
            (stub.rpc_store, dht_pb2.StoreRequest()),
        )
        found = []
        for method, request in requests:
            with pytest.raises(P2PHandlerError) as caught:
                await method(request, timeout=20.0)
            found.append(str(caught.value))
        await p2p.shutdown()
        return found

    assert all("not admitted: " in words for words in asyncio.run(ask()))


def test_an_observer_needs_a_pass_of_its_own(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    dht, identity = members.start("watched")
    publish(members, dht, identity)
    monkeypatch.setenv("TT_HOME", str(members.folder / "watching"))
    for _ in range(2):  # its key is free again after each
        with pytest.raises(NoPass, match="no pass was shown"):
            Observer(members.run, members.addresses)
    members.issuer.admit(members.folder / "watching", members.run, "observer", "somebody")
    with Observer(members.run, members.addresses) as observer:
        assert identity.peer_id in {one.peer_id for one in observer.records()}


def test_an_observer_of_an_open_run_sees_those_who_went_back_as_the_organiser_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Ed25519PrivateKey.generate()
    run = tiny_run(membership={"authority": "http://127.0.0.1:1", "authority_key": public_text(key)})
    back = RollBack(step=1, digest="aa", source="", order=7)
    notice = sign(Notice(run.identity, 1, time.time(), frozenset(), frozenset(), "new data", back), key)
    (tmp_path / "notice").write_text(notice)
    identity = claim_identity(tmp_path, "aux")
    dht = start_dht(run, identity, initial_peers=[], host="127.0.0.1")
    with ExitStack() as stack:
        stack.callback(stop_dht, dht)
        PeerDirectory(run, dht, identity)._store(record(identity.peer_id, time=get_dht_time(), era=7))
        monkeypatch.setenv("TT_HOME", str(tmp_path / "watching"))
        observer = stack.enter_context(Observer(run, addresses_of(dht)))
        assert (observer.records(), observer.notice()) == ([], None)
        dht.store(notice_key(run.identity), subkey=1, value=notice, expiration_time=get_dht_time() + HOUR)
        assert [one.peer_id for one in observer.records()] == [identity.peer_id]
        later = stack.enter_context(Observer(run, addresses_of(dht)))  # who takes the state asks for no records before
        assert (heard := later.notice()) is not None and heard.paused == "new data"


def test_a_ban_that_one_peer_knows_reaches_those_who_do_not_hear_the_authority(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tt_cli.swarm.membership.control_notices.EVERY_SECONDS", 0.2)
    (hearing, one), (deaf, two), (banned, three) = (members.start(name) for name in ("hearing", "deaf", "banned"))
    publish(members, banned, three)
    assert three.peer_id in {record.peer_id for record in read_records(deaf, members.run)}
    boards = [PeerDirectory(members.run, hearing, one), PeerDirectory(members.run, deaf, two)]
    members.issuer.ban([members.folder / "hearing"], members.run, ["Banned"])
    for board in boards:
        board.start()
    deadline = time.monotonic() + 60.0
    while not membership_at(deaf).is_banned(three.peer_id):
        assert time.monotonic() < deadline, "the ban did not arrive"
        boards[1].fresh_view()
    assert three.peer_id not in {record.peer_id for record in read_records(deaf, members.run)}
    for board in boards:
        board.stop()


def test_who_is_banned_is_neither_pinged_nor_waited_for(members: Members) -> None:
    """It is the only one through which the other joined, and its silence does not mean that this one is cut off."""
    (banned, identity), (other, _) = (members.start(name, role="aux") for name in ("mallory", "left"))
    publish(members, banned, identity)
    assert identity.peer_id in {record.peer_id for record in read_records(other, members.run)}
    is_banned = membership_at(other).is_banned
    contacts = ConnectivityMonitor(other, addresses_of(banned), banned=is_banned)
    contacts.accompanied([identity.peer_id])
    assert contacts.why_not_alone() == UNSEEN.format("another trainer")
    members.issuer.ban([members.folder / "left"], members.run, ["Mallory"])
    deadline = time.monotonic() + 60.0
    while contacts.ask().answered or not is_banned(identity.peer_id):
        assert time.monotonic() < deadline, "the ban was not read"
    assert not contacts.why_not_alone()


# ------------------------------------------------------------------ without a swarm


class Node:
    """What a door needs of hivemind's protocol."""

    IS_DICTIONARY = b""

    def __init__(self) -> None:
        self.storage, self.cache = ChainStorage(), ChainStorage()
        self.served = 0

    async def answer(self, request: Any, context: Any) -> dht_pb2.FindResponse:
        self.served += 1
        return dht_pb2.FindResponse()


def served(door: DHTAuthorizer, node: Node, request: Any, caller: str = "anna's") -> Any:
    context: Any = SimpleNamespace(remote_id=caller)
    return asyncio.run(door.serve(node, node.answer, request, context))  # type: ignore[arg-type]


def test_one_peer_asks_so_much_and_no_more(members: Members) -> None:
    guard, anna, ben = PassGuard(Admission(tiny_run())), *(PeerID(f"{name}'s".encode()) for name in ("anna", "ben"))
    guard.requests = RateLimit(burst=3.0, per_second=0.0)

    async def answer(request: bytes, caller: PeerID) -> bytes:
        return request

    for _ in range(3):
        assert asyncio.run(guard.guarded(answer)(frame("") + b"x", anna)) == frame("") + b"x"
    with pytest.raises(Crowded):
        asyncio.run(guard.guarded(answer)(frame("") + b"x", anna))
    asyncio.run(guard.guarded(answer)(frame("") + b"x", ben))
    door, node = DHTAuthorizer(Admission(tiny_run())), Node()
    served(door, node, dht_pb2.FindRequest(), "ben's")
    with pytest.raises(Crowded, match="too many keys"):
        served(door, node, dht_pb2.FindRequest(keys=[b"x" * 20] * 1000), "ben's")
    assert node.served == 1


def store(
    key: DHTID,
    subkey: object,
    value: bytes = b"x",
    *,
    life: float = 60.0,
    tag: bytes | None = None,
    cached: bool = False,
) -> dht_pb2.StoreRequest:
    return dht_pb2.StoreRequest(
        keys=[key.to_bytes()],
        subkeys=[MSGPackSerializer.dumps(subkey) if tag is None else tag],
        values=[value],
        expiration_time=[get_dht_time() + life],
        in_cache=[cached],
    )


def test_a_node_keeps_so_many_bytes_of_a_key_and_who_is_in_stays_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_BYTES", 4 * room.SHARE)
    door, node, key = DHTAuthorizer(Admission(tiny_run())), Node(), DHTID.generate()
    for number in range(3):
        served(door, node, store(key, number))
        node.storage.store_subkey(key, number, b"x", get_dht_time() + 60.0)
    served(door, node, store(key, 2, bytes(2 * room.SHARE)))  # there is room yet
    served(door, node, store(key, 3))
    node.storage.store_subkey(key, 3, b"x", get_dht_time() + 60.0)
    for number in range(4):
        served(door, node, store(key, number, bytes(room.SHARE)))
    for request in (store(key, 4), store(key, 3, bytes(room.SHARE + 1))):
        with pytest.raises(Crowded, match="no room"):
            served(door, node, request)
    served(door, node, store(DHTID.generate(), 4))


def test_of_a_record_that_takes_no_more_room_no_others_are_looked_at() -> None:
    """A node may keep a thousand, each renewed every few seconds."""
    door, node, key = DHTAuthorizer(Admission(tiny_run())), Node(), DHTID.generate()
    node.storage.store_subkey(key, 0, b"x", get_dht_time() + 60.0)
    unreadable: Any = (None,)
    node.storage.store_subkey(key, 1, unreadable, get_dht_time() + 60.0)
    served(door, node, store(key, 0, bytes(room.SHARE)))
    with pytest.raises(AttributeError):
        served(door, node, store(key, 0, bytes(room.SHARE + 1)))


def test_a_node_keeps_no_record_for_longer_than_the_run_says() -> None:
    key = DHTID.generate()
    door = DHTAuthorizer(Admission(tiny_run()), {key.to_bytes(): 150.0})
    served(door, Node(), store(key, 0, life=149.0))
    for life in (152.0, 1e6, float("inf"), float("nan")):
        with pytest.raises(Crowded, match="too long"):
            served(door, Node(), store(key, 0, life=life))
    run = tiny_run(swarm={"statistics_expiration": 60.0})
    lives = {name: lives_of(run)[DHTID.generate(name(run.identity)).to_bytes()] for name in (peers_key, history_key)}
    assert lives == {peers_key: 2 * 60.0 + 30.0, history_key: 600.0 + 30.0}


def test_a_node_takes_a_record_from_its_owner_alone(members: Members) -> None:
    """What lies in a node's cache it would hand out in place of all that it keeps; dictionaries are others' records."""
    door, key = DHTAuthorizer(Admission(tiny_run())), DHTID.generate()
    subkey = RSASignatureValidator(members.identity.key).local_public_key
    served(door, Node(), store(key, subkey), members.identity.peer_id)
    served(door, Node(), store(key, 7), "anna's")  # a notice: whoever has it hands it on
    for request in (store(key, subkey), store(key, None, tag=b""), store(key, 7, cached=True)):
        with pytest.raises(NotAdmitted, match="another peer's record|from their owners"):
            served(door, Node(), request)


def test_a_subkey_without_end_is_not_sought_for_owners() -> None:
    """The search for them would hold the node up for hours, before anything else is looked at."""
    with pytest.raises(Crowded, match="no room"):
        served(DHTAuthorizer(Admission(tiny_run())), Node(), store(DHTID.generate(), b"[owner:" * 2**19, bytes(2**18)))


async def _renew(_: DHT, node: Any, peer: str, key: str, subkey: bytes, chain: Any) -> bool | None:
    kept: bool | None = await node.protocol.call_renew(PeerID.from_base58(peer), DHTID.generate(key), subkey, chain)
    return kept


async def _known(_: DHT, node: Any, key: str, subkey: bytes) -> Any:
    return node.protocol.known(DHTID.generate(key)).get(subkey).value


async def _forget(_: DHT, node: Any) -> None:
    node.protocol.storage.clear()
    node.protocol.read.clear()


def test_nobody_renews_anothers_record(members: Members) -> None:
    (anna, identity), (ben, _) = members.start("anna-renews"), members.start("ben-renews")
    key, subkey = peers_key(members.run.identity), RSASignatureValidator(identity.key).local_public_key
    for epoch in (1, 2):
        publish(members, anna, identity, epoch=epoch)
    chain = anna.run_coroutine(partial(_known, key=key, subkey=subkey))
    assert [bool(link.since) for link in chain] == [False, True]
    members.aux.run_coroutine(_forget)
    kept_of = partial(_renew, peer=members.identity.peer_id, key=key, subkey=subkey, chain=chain)
    assert ben.run_coroutine(kept_of) is None, "as it lies at the others, signed by anna"
    assert anna.run_coroutine(kept_of) is True


def test_a_member_believes_no_stranger(members: Members) -> None:
    membership = membership_at(members.aux)
    guard, mallory, aux = PassGuard(membership), PeerID(b"mallory's"), PeerID.from_base58(members.identity.peer_id)
    shown = ""

    async def call(peer: PeerID, name: str, request: bytes) -> bytes:
        return frame(shown) + request[-1:]

    with pytest.raises(NotAdmitted, match="no pass"):
        asyncio.run(guard.call(call, mallory, "a.b", b"x"))
    shown = membership.mine()
    with pytest.raises(NotAdmitted, match="issued to another"):
        asyncio.run(guard.call(call, mallory, "a.b", b"x"))
    assert asyncio.run(guard.call(call, aux, "a.b", b"x")) == b"x"


def test_a_pass_is_shown_once_and_again_when_it_is_forgotten(members: Members) -> None:
    """Both ends are this member: what the one remembers, and forgets, is its own."""
    membership, peer = membership_at(members.aux), PeerID.from_base58(members.identity.peer_id)
    here, sizes = PassGuard(membership), list[int]()
    there = Admission(members.run, key_file(members.folder / "aux", members.run, "aux"))

    async def answer(request: bytes, caller: PeerID) -> bytes:
        return request.upper()

    async def call(to: PeerID, name: str, request: bytes) -> bytes:
        sizes.append(len(request))
        try:
            return await PassGuard(there).guarded(answer)(request, peer)
        except NotAdmitted as error:
            raise P2PHandlerError(repr(error)) from None

    async def twice() -> list[bytes]:
        return [
            await here.call(call, peer, "service.rpc_one", b"x"),
            await here.call(call, peer, "service.rpc_two", b"x"),
        ]

    long = len(frame(membership.mine())) + 1
    assert asyncio.run(twice()) == [b"X", b"X"] and sizes == [long, 3]
    there._passes.clear()
    assert asyncio.run(twice()) == [b"X", b"X"] and sizes == [long, 3, 3, long, 3]

    async def together() -> list[bytes]:
        both = asyncio.Barrier(2)  # they are on their way, and refused, before either is asked again

        async def meet(to: PeerID, name: str, request: bytes) -> bytes:
            await both.wait()
            return await call(to, name, request)

        return await asyncio.gather(*(here.call(meet, peer, "service.rpc_one", b"x") for _ in range(2)))

    there._passes.clear()
    assert asyncio.run(together()) == [b"X", b"X"]


def test_a_frame_is_nothing_else(members: Members) -> None:
    guard, door = PassGuard(membership_at(members.aux)), DHTAuthorizer(membership_at(members.aux))
    door._turned_away("no" * room.WORDS)
    assert door.refusal == "no" * (room.WORDS // 2), "as much of what somebody says as there is room for"

    async def answer(request: bytes, caller: PeerID) -> bytes:
        raise AssertionError("served")

    for data in (b"", b"\0", b"\xff\xff", b"\0\1", frame("x" * 5000), frame("words"), frame("")):
        with pytest.raises(NotAdmitted):
            asyncio.run(guard.guarded(answer)(data, PeerID(b"mallory's")))

"""Records in links: what changed costs a tenth of a record, and nobody but its owner's session adds to one."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time
from swarm.made import record
from swarm.test_dht_protocol import Nodes, run, started, values

from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.records.dht_protocol import tag_of
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.record_chain import NUMBERS, BrokenChain, Chain, ChainStorage, Link, Session, grown, opened
from tt_cli.swarm.wire import RENEWAL, RENEWED

KEY = DHTID.generate(source="key").to_bytes()
UNTIL = 1060.0
USUAL = {
    "user": "volunteer-7",
    "device": "NVIDIA GeForce RTX 3090",
    "digest": "3f" * 32,
    "figures": {"text_loss": 4.25, "image_loss": 4.5},
    "round": "step 100 made with 63 others, 4,102 samples",
    "loss": 4.125,
    "micro_batch": 8,
    "vote": True,
}


class Sender:
    """One node's session, and the chain that it has sent."""

    def __init__(self) -> None:
        self.session = Session()
        self.whole = self.said(time=1000.0)
        self.chain: Chain = (Link(UNTIL, 0.0, MSGPackSerializer.dumps(self.whole)),)

    def said(self, **changes: object) -> dict[str, Any]:
        return {**record("peer", **USUAL).model_dump(), **changes, "session": self.session.public}

    def pulse(self, seconds: float, **changes: object) -> Link | None:
        told = self.said(time=1000.0 + seconds, **changes)
        return self.session.pulse(KEY, self.whole, self.chain, told, UNTIL + seconds)

    def send(self, seconds: float, **changes: object) -> Link:
        pulse = self.pulse(seconds, **changes)
        assert pulse is not None
        self.chain = grown(KEY, self.whole, self.chain, pulse)
        assert opened(self.whole, self.chain) == self.said(time=1000.0 + seconds, **changes)
        return pulse


@pytest.fixture
def sender() -> Sender:
    return Sender()


STEP = {
    "epoch": 6,
    "digest": "7a" * 32,
    "round": "step 6 made with 63 others, 4,096 samples",
    "loss": 4.0,
    "samples": 0,
}


def test_what_changes_between_steps_is_told_in_a_tenth_of_a_record(sender: Sender) -> None:
    whole = len(sender.chain[0].data) + 360  # its RSA signature
    assert len(sender.send(1.0, samples=18, total_samples=108).data) < whole / 8
    assert len(sender.send(2.0, **STEP).data) < whole / 4
    later = sender.send(3.0, **{**STEP, "samples": 16, "total_samples": 116, "samples_per_second": 2.5})
    assert len(later.data) < whole / 8, "what a step changed is told once"
    assert later.since == UNTIL + 2.0
    assert [link.until for link in sender.chain] == [UNTIL, UNTIL + 2.0, UNTIL + 3.0]
    sender.send(4.0, **{**STEP, "samples": 24})
    assert [link.until for link in sender.chain] == [UNTIL, UNTIL + 2.0, UNTIL + 4.0]
    assert sender.send(5.0, **{**STEP, "epoch": 7}).since == UNTIL, "another state begins from the whole record"


@pytest.mark.parametrize(
    "changes",
    [{"pass_text": "tt-pass-1.x.y"}, {"peer_id": "another"}, {"clipped": ["x" * 80] * 7}],
    ids=["a pass", "a peer id", "too much"],
)
def test_what_a_pulse_may_not_say_takes_a_whole_record(changes: dict[str, object], sender: Sender) -> None:
    assert sender.pulse(1.0, **changes) is None


def test_a_node_that_began_anew_sends_a_whole_record_first(sender: Sender) -> None:
    sender.session = Session()
    assert sender.pulse(1.0, samples=11) is None


def test_nothing_is_told_of_an_earlier_time(sender: Sender) -> None:
    sender.send(5.0, samples=11)
    assert sender.pulse(4.0, samples=12) is None


def refused(sender: Sender, pulse: Link) -> bool:
    with pytest.raises(BrokenChain):
        grown(KEY, sender.whole, sender.chain, pulse)
    return True


def test_a_pulse_counts_as_it_was_signed_and_on_its_own_record_alone(sender: Sender) -> None:
    pulse, other = sender.pulse(1.0, samples=11), Sender().pulse(1.0, samples=11)
    assert pulse is not None and other is not None
    assert refused(sender, other)
    for wrong in (
        pulse._replace(until=UNTIL + 60.0),
        pulse._replace(since=UNTIL + 0.5),
        pulse._replace(data=pulse.data[:-1] + bytes([pulse.data[-1] ^ 1])),
        pulse._replace(data=msgpack.packb({NUMBERS["samples"]: 12}) + pulse.data[-64:]),
        pulse._replace(data=b""),
    ):
        assert refused(sender, wrong)
    with pytest.raises(BrokenChain):
        grown(DHTID.generate(source="other").to_bytes(), sender.whole, sender.chain, pulse)
    again = Link(UNTIL, 0.0, MSGPackSerializer.dumps({**sender.whole, "user": "mallory"}))
    with pytest.raises(BrokenChain):
        grown(KEY, sender.whole, (again,), pulse)
    assert len(grown(KEY, sender.whole, sender.chain, pulse)) == 2
    sender.send(2.0, **STEP)
    later = sender.pulse(3.0, **STEP, total_samples=116)
    assert later is not None and later.since == UNTIL + 2.0
    assert refused(sender, later._replace(since=UNTIL)), "it builds on the link that was signed"
    assert refused(sender, pulse), "older than what is known"


@pytest.mark.parametrize(
    "changed",
    [
        {NUMBERS["samples"]: -1},
        {NUMBERS["peer_id"]: "another"},
        {NUMBERS["pass_text"]: "another's"},
        {NUMBERS["session"]: "00" * 32},
        {NUMBERS["time"]: 5000.0},
        {len(NUMBERS): 1},
        {NUMBERS["era"] - len(NUMBERS): 1},
        {"samples": 1},
        [1, 2],
        {NUMBERS["clipped"]: ["x" * 80] * 8},
    ],
    ids=lambda changed: str(changed)[:24],
)
def test_what_a_session_signs_is_a_record_of_its_peer_all_the_same(changed: object, sender: Sender) -> None:
    data = bytes(msgpack.packb(changed))
    signer = Session()
    sender.whole = {**sender.whole, "session": signer.public}
    pulse = Link(UNTIL + 1.0, UNTIL, data)
    signed = pulse._replace(data=data + signer.sign(KEY, sender.chain[0], pulse))
    assert refused(sender, signed)


def test_a_chain_grows_no_longer(sender: Sender) -> None:
    sender.send(1.0, samples=11)
    second = sender.send(2.0, samples=12)
    data = bytes(msgpack.packb({NUMBERS["samples"]: 13}))
    third = Link(UNTIL + 3.0, second.until, data)
    assert refused(sender, third._replace(data=data + sender.session.sign(KEY, sender.chain[0], third)))


async def tell(node: Any, key: str, ahead: float = 0.0, **changes: object) -> bool:
    """Have a node publish its record, as a peer does whose clock is ahead by so many seconds."""
    now = get_dht_time() + ahead
    value = record(str(node.peer_id), **{**USUAL, "time": now}).model_dump() | changes
    return bool(await node.store(key, value, now + 60.0, subkey=str(node.peer_id)))


async def samples(node: Any, key: str, owner: Any, latest: bool = False) -> int:
    return int((await values(node, key, latest))[str(owner.peer_id)]["samples"])


def test_readers_see_what_changed_and_who_comes_later_sees_it_too() -> None:
    async def test(nodes: Nodes) -> None:
        owner, reader, _ = nodes.nodes
        assert await tell(owner, "key", samples=1)
        assert await samples(reader, "key", owner, latest=True) == 1
        for count in range(2, 8):
            assert await tell(owner, "key", samples=count, epoch=count // 3)
            assert await samples(reader, "key", owner) == count
        newcomer = await nodes.start()
        assert await samples(newcomer, "key", owner, latest=True) == 7
        shown = PeerRecord.model_validate((await values(newcomer, "key"))[str(owner.peer_id)])
        assert (shown.user, shown.epoch, shown.session) == ("volunteer-7", 2, owner.protocol.session.public)

    run(with_nodes(3, test))


def test_who_lost_a_record_is_sent_all_of_it_and_finds_its_owner_again() -> None:
    async def test(nodes: Nodes) -> None:
        owner, lost, reader = nodes.nodes
        assert await tell(owner, "key", samples=1)
        assert await tell(owner, "key", samples=2)
        lost.protocol.storage.clear()
        lost.protocol.read.clear()
        del lost.protocol.routing_table[owner.node_id]
        assert await tell(owner, "key", samples=3)
        assert await samples(lost, "key", owner) == 3
        assert lost.protocol.routing_table.get(node_id=owner.node_id) == owner.peer_id
        place = DHTID.generate(source="key")
        assert str(owner.peer_id) in lost.protocol.kept(place)
        assert await samples(reader, "key", owner) == 3

    run(with_nodes(3, test))


def test_who_was_alone_with_a_clock_far_ahead_is_read_once_that_is_set_back() -> None:
    """Its own node had kept what others would have refused, and told those who came later."""

    async def test(nodes: Nodes) -> None:
        (owner,) = nodes.nodes
        assert await tell(owner, "key", ahead=10_000.0, samples=1)
        reader = await nodes.start()
        for count in (2, 3):
            assert await tell(owner, "key", samples=count)
            assert await samples(reader, "key", owner, latest=True) == count
        assert len(owner.protocol.known(DHTID.generate(source="key")).get(str(owner.peer_id)).value) == 2

    run(with_nodes(1, test))


def test_what_a_storage_keeps_is_told_once() -> None:
    told, key, until = list[tuple[Any, ...]](), DHTID.from_bytes(KEY), get_dht_time() + 60.0
    storage, chain = ChainStorage(lambda *kept: told.append(kept)), (Link(until, 0.0, b"x"),)
    assert storage.store_subkey(key, "ann", b"x", until) and not storage.store_subkey(key, "ann", b"y", until - 1.0)
    assert told == [(key, "ann", chain)]
    assert storage.store_subkey(key, "ann", chain + chain, until + 1.0) and told[1:] == [(key, "ann", chain + chain)]


def test_who_renews_its_record_without_pause_takes_no_memory() -> None:
    hivemind_patches.apply()
    storage, key, until = ChainStorage(), DHTID.from_bytes(KEY), get_dht_time() + 60.0
    for subkey in ("cy", "ben"):
        assert storage.store_subkey(key, subkey, b"x", until + len(subkey))
    for number in range(1000):
        assert storage.store_subkey(key, "ann", b"x", until + number)
    kept = storage.get(key).value
    assert max(len(kept.expiration_heap), len(storage.expiration_heap)) < 100
    assert kept.top()[0] == "cy" and len(kept) == 3, "whose record ends first is the first to go"


class Records(RecordValidatorBase):
    """Takes what is a peer's record, whoever stores it."""

    def validate(self, record: DHTRecord) -> bool:
        with contextlib.suppress(ValueError):
            return bool(PeerRecord.model_validate(MSGPackSerializer.loads(record.value)))
        return False

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    strip_value = sign_value


def test_nothing_is_built_on_what_all_refuse() -> None:
    async def test() -> None:
        async with started(3, record_validator=Records()) as nodes:
            owner, reader, _ = nodes.nodes
            assert await tell(owner, "key", samples=1)
            assert not await tell(owner, "key", samples_per_second=math.inf)
            assert await tell(owner, "key", samples=2)
            assert await samples(reader, "key", owner, latest=True) == 2

    run(test())


def test_a_node_takes_a_renewal_of_what_it_knows_alone() -> None:
    async def test(nodes: Nodes) -> None:
        owner, keeper = nodes.nodes
        assert await tell(owner, "key", samples=1)
        assert await tell(owner, "key", samples=2)
        place = DHTID.generate(source="key")
        chain = owner.protocol.known(place).get(str(owner.peer_id)).value
        pulse = chain[-1]
        stub = owner.protocol.get_stub(keeper.peer_id)
        broken = pulse._replace(until=pulse.until + 1.0)
        for name, links in ((tag_of("nobody"), (pulse,)), (tag_of(str(owner.peer_id)), (broken,))):
            answer = await stub.rpc_renew(RENEWAL.message((KEY, name, links)), timeout=5.0)
            assert RENEWED.read(answer) == (False,)
        assert keeper.protocol.kept(place).get(str(owner.peer_id)).value == chain

    run(with_nodes(2, test))


async def with_nodes(number: int, test: Any) -> None:
    async with started(number) as nodes:
        await test(nodes)

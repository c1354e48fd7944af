"""Bytes from the network: whatever they are, they are refused as they should be, with little memory and in little time.

For each reader of such bytes: what it may raise. It gets random bytes, msgpack of random values, and what an honest
peer sends with some bytes changed, cut off, or put in.
"""

from __future__ import annotations

import functools
import math
import tracemalloc
from collections.abc import Callable
from itertools import product

import msgpack
import pytest
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swarm.handing import read_tree, state
from swarm.made import record
from swarm.rounds import CODEC, LAYOUT
from testbed.passes import Issuer

from tt_cli.identity.passes import InvalidPass, Notice, Pass, read_notice, read_pass, sign
from tt_cli.run import load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce import part_fetch
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer
from tt_cli.swarm.allreduce.messages import Accusation, Inputs, NotProven, Opening, RoundName, SignedJoin, Signer
from tt_cli.swarm.allreduce.rendezvous import entry_of, member_in
from tt_cli.swarm.allreduce.votes import read_status
from tt_cli.swarm.compression.codec import MalformedPart
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.membership.control_notices import notice_key
from tt_cli.swarm.membership.rsa_identity import peer_id_of
from tt_cli.swarm.network.addresses import tcp_addresses
from tt_cli.swarm.records.peer_record import HistoryRecord, history_key, peers_key
from tt_cli.swarm.records.publisher import _parse
from tt_cli.swarm.records.validator import RecordValidator

pytestmark = pytest.mark.slow

ISSUER = Issuer()
RUN = ISSUER.closed(load_run("emoji"))
AUTHORITY = RUN.membership.authority_key or ""
CLOSED = Admission(RUN)
SIGNER = RSASignatureValidator(RSAPrivateKey())
PEER = peer_id_of(SIGNER._private_key.get_public_key().to_bytes())
PASS = sign(Pass("anna", PEER, RUN.identity, 900.0, 1e10), ISSUER._key)
NOTICE = sign(Notice(RUN.identity, 7, 900.0, frozenset({"ben"}), frozenset(), "", None), ISSUER._key)
SIGNED = Signer(SIGNER._private_key)
OPENING = Opening(RoundName(RUN.identity, "5_ab", b"group"), PEER, PEER, 4.0, 0.1, (bytes(32),))
MOST_BYTES = 2**25  # of memory: what an answer is checked against may be large, such as the tree of a state
JOIN = SignedJoin(RUN.identity, "5_ab", PEER, 900.0, True, 8000, True, PASS)
STORE = AverageBuffer(LAYOUT, CODEC)
PART = 4096
ENCODED = {large: CODEC.of(large).encode(torch.linspace(-1, 1, PART)) for large in (True, False)}


def message(data: bytes) -> runtime_pb2.ExpertInfo:
    return runtime_pb2.ExpertInfo(serialized_info=data)


def tensor(data: bytes) -> runtime_pb2.Tensor:
    """A part whose bytes are these; or, as protobuf would have it, anything else that these bytes can be."""
    try:
        return runtime_pb2.Tensor.FromString(data)
    except Exception:  # protobuf's DecodeError: hivemind drops such a message
        return runtime_pb2.Tensor(buffer=data, size=[PART], dtype="float32", compression=64)


def a_part(large: bool) -> Callable[[bytes], object]:
    return lambda data: CODEC.read_part(tensor(data), PART, large)


def read_of_dht(data: bytes) -> object:
    """As readers do with what lies under the subkeys of the run's records."""
    value = MSGPackSerializer.loads(data)
    return list(_parse(dict.fromkeys((SIGNER.local_public_key, data, b"[owner:x]"), value), RUN, CLOSED, 1000.0))


def valid_record(**changes: object) -> bytes:
    return MSGPackSerializer.dumps(record(PEER, **{"pass_text": PASS, **changes}).model_dump())


READERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...], bytes]] = {
    **{name: (form.read, (wire.MalformedMessage,), form.pack(form.example)) for name, form in wire.FORMS.items()},
    "status": (
        lambda data: read_status(message(data), 2),
        (ValueError,),
        wire.STATUS.pack((b"group", bytes(32), b"vote", {"samples": 4, "loss": 1.0}, b"", {}, {}, False, {})),
    ),
    "average": (
        lambda data: part_fetch._read_header(message(data), STORE),
        (ValueError,),
        wire.AVERAGE_HEADER.pack(((1, 1), bytes(16 * len(LAYOUT.parts((1, 1)))), (b"vote",))),
    ),
    "opening that was signed": (Opening.read, (NotProven,), OPENING.sign(SIGNED)),
    "inputs": (Inputs.read, (NotProven,), Inputs((b"opening",), (1,)).pack()),
    "proof": (Accusation.read, (NotProven,), Accusation(b"", b"", 0, ()).pack()),
    "large part": (a_part(True), (MalformedPart,), CODEC.message(ENCODED[True], PART, True).SerializeToString()),
    "small part": (a_part(False), (MalformedPart,), CODEC.message(ENCODED[False], PART, False).SerializeToString()),
    "large bytes": (lambda data: CODEC.check_part(data, PART, True), (MalformedPart,), ENCODED[True]),
    "small bytes": (lambda data: CODEC.check_part(data, PART, False), (MalformedPart,), ENCODED[False]),
    "manifest": (read_tree, (ValueError,), state().tree().manifest()),
    "addresses": (lambda data: tcp_addresses([data.decode(errors="replace")]), (), b"/ip4/203.0.113.7/tcp/31337"),
    "told to the leader": (
        lambda data: member_in(data, PeerID.from_base58(PEER), CLOSED),
        (ValueError, NotAdmitted),
        entry_of(JOIN.sign(SIGNED), (b"vote",)),
    ),
    "pass": (
        lambda data: read_pass(data.decode(errors="replace"), AUTHORITY, RUN.identity, 1000.0),
        (InvalidPass,),
        PASS.encode(),
    ),
    "notice": (
        lambda data: read_notice(data.decode(errors="replace"), AUTHORITY, RUN.identity, 1000.0),
        (InvalidPass,),
        NOTICE.encode(),
    ),
    "key of a record": (peer_id_of, (ValueError,), SIGNER._private_key.get_public_key().to_bytes()),
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 300) | st.binary(max_size=8), inner, max_size=4)
        | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=30))
        | st.builds(lambda data: msgpack.ExtType(0x40, msgpack.packb(data)), inner)
        | st.builds(lambda data: msgpack.ExtType(0x50, msgpack.packb([None, 2e9, [[b"x", data, 2e9]]])), inner)
    ),
    max_leaves=12,
)


@st.composite
def changed(draw: st.DrawFn, honest: bytes) -> bytes:
    """The honest bytes, with a few of them changed, taken away or put in."""
    data = bytearray(honest)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 8)))
        data[at:end] = draw(st.binary(max_size=8))
    return bytes(data)


@functools.cache
def anything(honest: bytes) -> st.SearchStrategy[bytes]:
    return (
        st.binary(max_size=200) | values.map(lambda value: msgpack.packb(value, strict_types=False)) | changed(honest)
    )


HUGE = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc9\xff\xff\xff\xff\x50",  # an extension
    b"\x91" * 100_000,  # nested
    b"\xc7\x03\x40\x91\x91\x90" * 20_000,
    bytes(2**20),
    b"\x93" + b"\xdd\xff\xff\xff\xff" * 3,
    (2**32 - 1).to_bytes(4, "little") + bytes(100),
    runtime_pb2.Tensor(buffer=b"x", size=[2**31 - 1] * 2, dtype="float32", compression=64).SerializeToString(),
    runtime_pb2.Tensor(buffer=bytes(100), size=[PART], dtype="x" * 10**5, compression=2**31 - 1).SerializeToString(),
]


def read(reader: str, data: bytes) -> bool:
    """Whether it is taken. Fails for any other exception than the declared ones."""
    function, declared, _ = READERS[reader]
    try:
        function(data)
    except declared:
        return False
    return True


@pytest.mark.parametrize("reader", READERS)
def test_what_honest_peers_send_is_taken(reader: str) -> None:
    assert read(reader, READERS[reader][2])


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_anything_else_is_refused_as_declared(reader: str, data: st.DataObject) -> None:
    read(reader, data.draw(anything(READERS[reader][2])))


@pytest.mark.parametrize("reader", READERS)
def test_declared_sizes_cost_nothing(reader: str) -> None:
    tracemalloc.start()
    try:
        for data in HUGE:
            tracemalloc.reset_peak()
            read(reader, data)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, (len(data), data[:3].hex())
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------ the DHT's nodes, and those who read from them

KEYS = [DHTID.generate(source=key(RUN.identity)).to_bytes() for key in (peers_key, history_key, notice_key)]
SUBKEYS = [MSGPackSerializer.dumps(SIGNER.local_public_key), MSGPackSerializer.dumps(7), b""]
HISTORY = HistoryRecord(peer_id=PEER, pass_text=PASS, time=1000.0, steps=[(1, 2.0, 900.0)]).model_dump()
HONEST = [
    DHTRecord(KEYS[0], SUBKEYS[0], valid_record(), 1600.0),
    DHTRecord(KEYS[1], SUBKEYS[0], MSGPackSerializer.dumps(HISTORY), 1600.0),
    DHTRecord(KEYS[2], SUBKEYS[1], MSGPackSerializer.dumps(NOTICE), 1600.0),
]
VALIDATOR = RecordValidator(RUN.identity, CLOSED, AUTHORITY)


@pytest.mark.parametrize("honest", HONEST, ids=["peer", "history", "notice"])
def test_honest_records_are_kept(honest: DHTRecord) -> None:
    node = CompositeValidator([VALIDATOR, SIGNER])
    assert node.validate(DHTRecord(honest.key, honest.subkey, node.sign_value(honest), honest.expiration_time))


LONG = Notice(RUN.identity, 7, 900.0, frozenset(f"{n:0128}" for n in range(500)), frozenset(), "", None)


@pytest.mark.parametrize(
    "record",
    [
        DHTRecord(KEYS[0], SUBKEYS[0], valid_record(pass_text=""), 1600.0),
        DHTRecord(KEYS[1], SUBKEYS[0], MSGPackSerializer.dumps({**HISTORY, "pass_text": ""}), 1600.0),
        DHTRecord(KEYS[2], MSGPackSerializer.dumps(8), HONEST[2].value, 1600.0),
        DHTRecord(KEYS[2], SUBKEYS[1], HONEST[2].value, math.inf),
        DHTRecord(KEYS[2], SUBKEYS[1], MSGPackSerializer.dumps(sign(LONG, ISSUER._key)), 1600.0),
    ],
    ids=["no pass", "history without one", "other number", "for ever", "long"],
)
def test_a_closed_run_keeps_neither_who_shows_no_pass_nor_any_notice(record: DHTRecord) -> None:
    assert not VALIDATOR.validate(record)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_record_breaks_a_node(data: st.DataObject) -> None:
    """And none is kept that an honest peer has not signed: the bytes here pass for signed ones."""
    honest = data.draw(st.sampled_from(HONEST))
    found = DHTRecord(
        data.draw(st.sampled_from(KEYS) | st.binary(max_size=20)),
        data.draw(st.sampled_from(SUBKEYS) | anything(honest.subkey)),
        data.draw(st.just(honest.value) | anything(honest.value)),
        data.draw(st.sampled_from([1600.0, math.inf, math.nan, -1.0, 1e300]) | st.floats()),
    )
    kept = VALIDATOR.validate(found)
    if kept and found.key == KEYS[2]:
        assert found.value == HONEST[2].value


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(anything(valid_record()))
def test_no_value_breaks_a_reader(data: bytes) -> None:
    try:
        MSGPackSerializer.loads(data)
    except Exception:  # hivemind's own reading of what a node answers: it drops the answer
        return
    read_of_dht(data)


def test_no_huge_record_is_looked_at() -> None:
    for key, data in product(KEYS, HUGE):
        for subkey, value in ((SUBKEYS[0], data), (data, valid_record()), (SUBKEYS[1], data)):
            assert not VALIDATOR.validate(DHTRecord(key, subkey, value, 1600.0)), (len(data), data[:3].hex())

"""What the nodes of a run's DHT keep, and what readers believe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration
from swarm.made import record

from tt_cli.identity.passes import CLOCK_LEEWAY
from tt_cli.identity.peer_key import public_der, public_key
from tt_cli.run import RunConfig, load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import NotProven, open_envelope
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.dht_auth import MAX_LIFE
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity, owners_of
from tt_cli.swarm.records.dht_search import Checked
from tt_cli.swarm.records.peer_record import HistoryRecord, history_key, peers_key
from tt_cli.swarm.records.publisher import read_history, read_records
from tt_cli.swarm.records.validator import MAX_HISTORY, MAX_RECORD, RecordValidator

RUN = "emoji-00000000"
ANYBODY = Admission(load_run("emoji"))
VALIDATOR = RecordValidator(RUN, ANYBODY)
EXPIRES = 1600.0  # records are of the time 1000


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return claim_identity(tmp_path_factory.mktemp("alice"), "trainer")


@pytest.fixture(scope="module")
def mallory(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return claim_identity(tmp_path_factory.mktemp("mallory"), "trainer")


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return load_run("emoji")


def owner_of(identity: Identity) -> bytes:
    return RSASignatureValidator(identity.key).local_public_key


def dht_record(key: str, subkey: Any, value: Any, signer: Identity | None = None) -> DHTRecord:
    """As hivemind would store it, signed by `signer`."""
    bare = DHTRecord(
        key=DHTID.generate(source=key).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=value if isinstance(value, bytes) else MSGPackSerializer.dumps(value),
        expiration_time=EXPIRES,
    )
    if signer is None:
        return bare
    signed = CompositeValidator([RSASignatureValidator(signer.key)]).sign_value(bare)
    return DHTRecord(bare.key, bare.subkey, signed, bare.expiration_time)


def accepted(one: DHTRecord, reader: Identity) -> bool:
    """As a node of the run decides, with both validators in hivemind's order."""
    return CompositeValidator([VALIDATOR, RSASignatureValidator(reader.key)]).validate(one)


def test_a_signed_record_of_its_owner_is_kept(alice: Identity, mallory: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    assert accepted(dht_record(peers_key(RUN), owner_of(alice), value, alice), mallory)


def history_of(identity: Identity) -> dict[str, Any]:
    return HistoryRecord(peer_id=identity.peer_id, time=1000.0, steps=[(1, 2.5, 1000.0)]).model_dump()


def test_a_history_is_kept_of_the_peer_that_it_names(alice: Identity, mallory: Identity) -> None:
    assert accepted(dht_record(history_key(RUN), owner_of(alice), history_of(alice), alice), mallory)
    assert not accepted(dht_record(history_key(RUN), owner_of(mallory), history_of(alice), mallory), alice)
    trainers = {**history_of(alice), "role": "trainer"}
    assert not accepted(dht_record(history_key(RUN), owner_of(alice), trainers, alice), mallory)


def test_nobody_speaks_for_another_peer_id(alice: Identity, mallory: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    assert not accepted(dht_record(peers_key(RUN), owner_of(mallory), value, mallory), alice)


def test_nobody_signs_for_another_key(alice: Identity, mallory: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    as_mallory = dht_record(peers_key(RUN), owner_of(mallory), value, mallory)
    forged = dht_record(peers_key(RUN), owner_of(alice), value)
    stolen = DHTRecord(forged.key, forged.subkey, as_mallory.value, forged.expiration_time)
    assert not accepted(forged, alice)
    assert not accepted(stolen, alice)


def test_a_signature_is_for_one_expiration_time(alice: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    kept = dht_record(peers_key(RUN), owner_of(alice), value, alice)
    prolonged = DHTRecord(kept.key, kept.subkey, kept.value, kept.expiration_time + 60)
    assert accepted(kept, alice) and not accepted(prolonged, alice)


@pytest.mark.parametrize("subkey", ["x", b"x", 7, None, [b"[owner:x]"], b"[owner:]", b"[owner:ssh-rsa AAAA]"])
def test_a_record_without_an_owner_is_refused(subkey: object, alice: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    assert not VALIDATOR.validate(dht_record(peers_key(RUN), subkey, value))


def test_a_record_outside_a_dictionary_is_refused(alice: Identity) -> None:
    value = MSGPackSerializer.dumps(record(alice.peer_id).model_dump())
    plain = DHTRecord(DHTID.generate(source=peers_key(RUN)).to_bytes(), b"", value, EXPIRES)
    assert not VALIDATOR.validate(plain)


def test_a_record_of_two_owners_is_refused(alice: Identity, mallory: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    both = owner_of(alice) + owner_of(mallory)
    assert not VALIDATOR.validate(dht_record(peers_key(RUN), both, value))


def test_a_key_of_another_kind_is_refused(alice: Identity) -> None:
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    value = record(alice.peer_id).model_dump()
    for owner in (b"[owner:" + text + b"]", b"[owner:ssh-unheard-of AAAA]"):
        assert not VALIDATOR.validate(dht_record(peers_key(RUN), owner, value))


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", b"\x81", b"\xff" * 40, b"\xd9\xff", "words", [1], 5, {}, {"steps": []}],
    ids=lambda value: str(value)[:20],
)
def test_a_malformed_record_is_refused(value: object, alice: Identity) -> None:
    assert not VALIDATOR.validate(dht_record(peers_key(RUN), owner_of(alice), value))


def test_a_record_under_the_other_key_is_refused(alice: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    assert not VALIDATOR.validate(dht_record(history_key(RUN), owner_of(alice), value))
    assert not VALIDATOR.validate(dht_record(peers_key(RUN), owner_of(alice), history_of(alice)))
    assert not VALIDATOR.validate(dht_record(peers_key(RUN), owner_of(alice), {**value, "extra": "x" * 10**6}))


def test_what_an_honest_peer_says_has_room_and_no_more(alice: Identity) -> None:
    full = {name: "x" * 80 for name in ("user", "device", "version", "round")}
    full |= {name: [alice.peer_id] * 8 for name in ("clipped", "accused", "slow")} | {"digest": "3f" * 32}
    full |= {"figures": {f"{number:x<24}": 1.5 for number in "abcd"}, "pass_text": "x" * 600}
    full |= {name: 10**12 for name in ("samples", "total_samples", "bytes_sent", "bytes_received", "micro_batch")}
    full |= dict.fromkeys(("inner_steps", "sent_per_hour", "received_per_hour"), 10**12)
    peer, history = record(alice.peer_id).model_dump() | full, history_of(alice) | {"pass_text": "x" * 600}
    history["steps"] = [(10**12, 1.5, 1e9 + 0.5)] * 256
    assert accepted(dht_record(peers_key(RUN), owner_of(alice), peer, alice), alice)
    assert accepted(dht_record(history_key(RUN), owner_of(alice), history, alice), alice)
    for key, value, largest in ((peers_key, peer, MAX_RECORD), (history_key, history, MAX_HISTORY)):
        whole = dht_record(key(RUN), owner_of(alice), value)
        pad = largest - len(whole.value)
        fits, fat = (
            dht_record(key(RUN), owner_of(alice), {**value, "pass_text": "x" * (600 + more)}) for more in (pad, pad + 1)
        )
        assert len(fits.value) == largest and VALIDATOR.validate(fits) and not VALIDATOR.validate(fat)


def test_no_other_keys_are_kept(alice: Identity) -> None:
    """A node's memory is for its run; what is under another key nobody could bound."""
    value = record(alice.peer_id).model_dump()
    for key in ("emoji-00000000_peer", "emoji-11111111_peers", "anything", f"{RUN}.all_averagers"):
        assert not accepted(dht_record(key, owner_of(alice), value, alice), alice)
        assert not VALIDATOR.validate(dht_record(key, b"x", 1.0))


class Unasked(RecordValidatorBase):  # type: ignore[misc]
    """In the place of hivemind's check of a signature."""

    def validate(self, record: DHTRecord) -> bool:
        raise AssertionError("this may take long")


def test_nothing_is_sought_in_what_is_longer_than_an_owners_key_or_has_two_signatures(alice: Identity) -> None:
    """The time for that grows with the square of the length: minutes for a mebibyte."""
    long, bare = 2**22, dht_record(peers_key(RUN), owner_of(alice), b"x", alice)
    assert owners_of(b"[owner:" * long) == [] != owners_of(owner_of(alice))
    for part, word in (("key", b"[owner:"), ("subkey", b"[owner:"), ("value", b"[signature:")):
        assert not Checked([Unasked()]).validate(replace(bare, **{part: word * (long // len(word))}))
    assert Checked([RSASignatureValidator(alice.key)]).validate(bare)


@pytest.mark.parametrize(
    ("bits", "exponent"),
    [(1024, 65537), (8192, 65537), (2048, 2**32 + 1), (3072, 2**3071 + 1)],
    ids=["short", "long", "exponent", "long exponent"],
)
def test_no_signature_is_looked_at_of_a_key_with_which_that_takes_long(bits: int, exponent: int) -> None:
    key = RSAPublicNumbers(exponent, 2**bits - 1).public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert not Checked([Unasked()]).validate(dht_record(peers_key(RUN), b"[owner:" + text + b"]", b"x"))
    with pytest.raises(NotProven, match="small exponent"):
        open_envelope(wire.ENVELOPE.pack((b"body", text, b"signature")))
    with pytest.raises(ValueError):
        public_key(public_der(key))


def test_one_key_has_one_record(alice: Identity) -> None:
    """The same key under another subkey would be another entry in every node's memory."""
    value = record(alice.peer_id).model_dump()
    again = owner_of(alice)[:-1] + b" a comment]"
    for subkey in (owner_of(alice) + b"2", b"2" + owner_of(alice), again):
        assert not VALIDATOR.validate(dht_record(peers_key(RUN), subkey, value))


@pytest.mark.parametrize(("time", "kept"), [(1600.0, True), (1601.0, False), (1e12, False), (-85000.0, False)])
def test_a_record_is_of_a_time_before_its_end_and_does_not_last(time: float, kept: bool, alice: Identity) -> None:
    value = record(alice.peer_id).model_dump() | {"time": time}
    assert accepted(dht_record(peers_key(RUN), owner_of(alice), value, alice), alice) == kept


@pytest.mark.parametrize("life", [MAX_LIFE + 1, float("inf"), float("nan")])
def test_no_record_lives_for_ever(life: float, alice: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    eternal = replace(dht_record(peers_key(RUN), owner_of(alice), value), expiration_time=1000.0 + life)
    assert not VALIDATOR.validate(eternal)


class Found:
    """A DHT that finds what it is given: {subkey: value}, or anything else as it is."""

    membership = ANYBODY

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def get(self, key: str, latest: bool, return_future: bool) -> Any:
        assert latest and return_future
        return self

    def result(self, timeout: float) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        if not isinstance(self.answer, dict):
            return self.answer
        entries = {subkey: ValueWithExpiration(value, EXPIRES) for subkey, value in self.answer.items()}
        return ValueWithExpiration(entries, EXPIRES)


def test_everybodys_newest_record_is_read(run: RunConfig, alice: Identity, mallory: Identity) -> None:
    ours, theirs = record(alice.peer_id).model_dump(), record(mallory.peer_id, time=993.0).model_dump()
    again = {**theirs, "time": 994.0, "digest": "bb"}
    found = Found(
        {
            owner_of(alice): ours,
            owner_of(mallory): theirs,
            owner_of(mallory) + b"2": again,  # one key may sign more than one subkey
            b"3" + owner_of(mallory): {**theirs, "time": 992.0},
        }
    )
    read = {one.peer_id: one for one in read_records(found, run, 1000.0)}
    assert set(read) == {alice.peer_id, mallory.peer_id}
    assert read[alice.peer_id].model_dump() == ours
    assert read[mallory.peer_id].model_dump() == again
    assert len(read_records(found, run, 1000.0)) == 2


def test_a_record_counts_for_two_lives_however_long_it_lies_there(run: RunConfig, alice: Identity) -> None:
    """A burst of records that live for a day would hold a run up that long."""
    found = Found({owner_of(alice): record(alice.peer_id, time=1000.0).model_dump()})
    first, last = 1000.0 - CLOCK_LEEWAY, 1000.0 + 2 * run.swarm.statistics_expiration + CLOCK_LEEWAY
    for now, counts in ((first - 1, False), (first, True), (last, True), (last + 1, False)):
        assert bool(read_records(found, run, now)) == counts


def test_the_newest_word_of_who_left_is_that_it_left(run: RunConfig, alice: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    later = {owner_of(alice): value, owner_of(alice) + b"2": {**value, "left": True, "time": 2000.0}}
    assert [one.left for one in read_records(Found(later), run, 2000.0)] == [True]


def test_what_should_not_be_there_is_passed_over(run: RunConfig, alice: Identity, mallory: Identity) -> None:
    value = record(alice.peer_id).model_dump()
    nonsense = {
        owner_of(mallory): value,
        b"no owner": value,
        "text": value,
        b"[owner:ssh-rsa AAAA]": value,
        b"[owner:ssh-unheard-of AAAA]": value,
        owner_of(alice) + owner_of(mallory): value,
        b"1" + owner_of(alice): {"peer_id": alice.peer_id},
        b"2" + owner_of(alice): None,
    }
    assert read_records(Found(nonsense), run, 1000.0) == []
    assert len(read_records(Found({**nonsense, owner_of(alice): value}), run, 1000.0)) == 1


@pytest.mark.parametrize("answer", [None, TimeoutError(), ValueWithExpiration(b"plain", EXPIRES)], ids=str)
def test_a_dht_without_an_answer_gives_nothing(answer: object, run: RunConfig) -> None:
    assert read_records(Found(answer), run) == []
    assert read_history(Found(answer), run) is None


def test_the_longest_history_is_read(run: RunConfig) -> None:
    one, longer = {"steps": [(1, 2.5, 1000.0)]}, {"steps": [(1, 2.5, 1000.0), (2, 2.25, 1001.0)]}
    impossible = {"steps": [(1, 2.5, 1000.0), (2, 2.25, 1001.0), (10**9, 2.0, 1002.0)]}
    said = {b"a": one, b"b": longer, b"c": {"steps": "many"}, b"d": None, b"e": impossible}
    history = read_history(Found(said), run)
    assert history is not None and [step[0] for step in history.steps] == [1, 2]

"""What searches of the DHT bring and what they leave behind, between real nodes; and what is not checked twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht import DHT, DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hypothesis import given
from hypothesis import strategies as st
from swarm.made import record

from tt_cli.run import load_run
from tt_cli.swarm.membership.rsa_identity import Identity, claim_identity
from tt_cli.swarm.network.dht_node import addresses_of, dht_time, start_dht, stop_dht
from tt_cli.swarm.records import dht_search
from tt_cli.swarm.records.dht_search import Checked, beside, digest_of
from tt_cli.swarm.records.peer_record import peers_key
from tt_cli.swarm.wire import RECORDS_ANSWER

RUN = load_run("emoji")
PEERS, LONG = 4, 60.0
RECORD = DHTRecord(b"key", b"subkey", b"value", 10.0)


class Swarm:
    """Nodes that know each other."""

    def __init__(self, folders: list[Path], stack: ExitStack):
        self.identities = [claim_identity(folder, "trainer") for folder in folders]
        self.nodes: list[DHT] = []
        known: list[str] = []
        for identity in self.identities:
            self.nodes.append(start_dht(RUN, identity, initial_peers=known, host="127.0.0.1"))
            stack.callback(stop_dht, self.nodes[-1])
            known = known or addresses_of(self.nodes[0])[:1]
        self.reader = start_dht(RUN, None, initial_peers=known, client_mode=True)  # which keeps nothing
        stack.callback(stop_dht, self.reader)

    def store(self, node: DHT, identity: Identity) -> bool:
        now = dht_time()
        stored = node.store(
            peers_key(RUN.identity),
            subkey=RSASignatureValidator(identity.key).local_public_key,
            value=record(identity.peer_id, time=now).model_dump(),
            expiration_time=now + 60,
            return_future=True,
        )
        return bool(stored.result(timeout=LONG))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with ExitStack() as stack:
        yield Swarm([tmp_path_factory.mktemp("lookup") for _ in range(PEERS)], stack)


class CountingStub:
    """Another node's methods, which count calls and the records in their answers."""

    def __init__(self, stub: Any, counts: Counter[str]):
        self._stub, self._counts = stub, counts

    def __getattr__(self, name: str) -> Any:
        async def counted(*args: Any, **more: Any) -> Any:
            answer = await getattr(self._stub, name)(*args, **more)
            self._counts[name] += 1
            if name == "rpc_records":
                self._counts["records"] += len(RECORDS_ANSWER.read(answer)[1])
            return answer

        return counted


async def _watch(_: DHT, node: DHTNode) -> None:
    """From now on, count what the node asks and is told."""
    node.counts = Counter()
    get_stub = node.protocol.get_stub
    node.protocol.get_stub = lambda peer: CountingStub(get_stub(peer), node.counts)


async def _counted(_: DHT, node: DHTNode) -> dict[str, int]:
    found = dict(node.counts, cached=len(node.protocol.cache))
    node.counts.clear()
    return found


def test_who_renews_its_record_searches_no_more_and_is_told_no_others(swarm: Swarm) -> None:
    for node, identity in zip(swarm.nodes, swarm.identities, strict=True):
        assert swarm.store(node, identity)
    node = swarm.nodes[1]
    node.run_coroutine(_watch)
    assert swarm.store(node, swarm.identities[1])
    assert node.run_coroutine(_counted) == {"rpc_renew": PEERS - 1, "cached": 0}
    assert len(node.get(peers_key(RUN.identity), latest=True).value) == PEERS
    assert node.run_coroutine(_counted) == {"rpc_records": PEERS - 1, "records": 0, "cached": 0}, "it keeps all itself"


def test_a_reader_is_told_what_is_new(swarm: Swarm) -> None:
    key, reader = peers_key(RUN.identity), swarm.reader
    reader.run_coroutine(_watch)
    for node, identity in zip(swarm.nodes, swarm.identities, strict=True):
        assert swarm.store(node, identity)
    assert len(reader.get(key, latest=True).value) == PEERS
    counted = reader.run_coroutine(_counted)
    assert (counted["rpc_records"], counted["records"]) == (PEERS, PEERS * PEERS), "all keep those of all"
    assert len(reader.get(key, latest=True).value) == len(reader.get(key).value) == PEERS
    assert reader.run_coroutine(_counted) == {"rpc_records": PEERS + 1, "records": 0, "cached": 0}
    assert swarm.store(swarm.nodes[2], swarm.identities[2])
    found = reader.get(key).value
    assert reader.run_coroutine(_counted) == {"rpc_records": 1, "records": 1, "cached": 0}
    assert found == swarm.nodes[3].get(key, latest=True).value


@given(st.integers(0, DHTID.MAX - 1), st.lists(st.integers(0, DHTID.MAX - 1), min_size=2, max_size=8, unique=True))
def test_the_nodes_nearest_to_a_key_are_nearest_beside_it(key: int, nodes: list[int]) -> None:
    ids = [DHTID(node & ~1) for node in dict.fromkeys(node & ~1 for node in nodes)]  # none differs by the last bit only
    meant = DHTID(key)
    assert beside(beside(meant)) == meant != beside(meant)
    assert sorted(ids, key=meant.xor_distance) == sorted(ids, key=beside(meant).xor_distance)


class Counting(RecordValidatorBase):
    """Lets values pass that do not begin with "bad"."""

    def __init__(self) -> None:
        self.asked = 0

    def validate(self, record: DHTRecord) -> bool:
        self.asked += 1
        return not record.value.startswith(b"bad")


def test_what_has_passed_is_not_checked_again() -> None:
    each = Counting()
    checked = Checked([each])
    assert checked.validate(RECORD) and checked.validate(replace(RECORD))
    assert each.asked == 1


@pytest.mark.parametrize(
    "other",
    [
        *({"key": b"key2"}, {"subkey": b"subkey2"}, {"value": b"value2"}, {"expiration_time": 11.0}),
        {"key": b"keys", "subkey": b"ubkey"},  # the same bytes one after the other
    ],
)
def test_a_record_that_differs_in_anything_is_checked(other: dict[str, Any]) -> None:
    each = Counting()
    checked = Checked([each])
    assert checked.validate(RECORD) and checked.validate(replace(RECORD, **other))
    assert each.asked == 2
    assert digest_of(RECORD) != digest_of(replace(RECORD, **other))


def test_what_was_refused_is_refused_again() -> None:
    each = Counting()
    checked = Checked([each])
    assert not any(checked.validate(replace(RECORD, value=b"bad")) for _ in range(3))
    assert each.asked == 3


def test_what_passed_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_search, "MOST_KNOWN", 2)
    each = Counting()
    checked = Checked([each])
    for value in (b"1", b"2", b"1", b"3"):  # the second is the one that nobody asked for again
        assert checked.validate(replace(RECORD, value=value))
    assert each.asked == 3
    assert checked.validate(replace(RECORD, value=b"1")) and each.asked == 3
    assert checked.validate(replace(RECORD, value=b"2")) and each.asked == 4


def test_each_signs_its_own_and_nobody_else(swarm: Swarm) -> None:
    mine, theirs = (RSASignatureValidator(identity.key) for identity in swarm.identities[:2])
    checked = Checked([mine])
    own = replace(RECORD, subkey=mine.local_public_key)
    signed = replace(own, value=checked.sign_value(own))
    assert checked.validate(signed) and checked.strip_value(signed) == RECORD.value
    assert not checked.validate(own)
    other = replace(RECORD, subkey=theirs.local_public_key)
    assert checked.sign_value(other) == RECORD.value


async def _be_patient(_: DHT, node: DHTNode) -> None:
    node.protocol.wait_timeout = 3600.0


def test_a_node_that_hangs_holds_up_no_renewal(swarm: Swarm) -> None:
    node, hanging = swarm.nodes[1], swarm.nodes[2].pid
    assert hanging is not None and swarm.store(node, swarm.identities[1])
    node.run_coroutine(_be_patient)
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert swarm.store(node, swarm.identities[1])
    finally:
        os.kill(hanging, signal.SIGCONT)


async def _avoid_all(_: DHT, node: DHTNode) -> None:
    """As after a moment in which nobody answered."""
    node._nearest.clear()
    for peer in list(node.protocol.routing_table.peer_id_to_uid):
        node.blacklist.register_failure(peer)


async def _avoid_nobody(_: DHT, node: DHTNode) -> None:
    node.blacklist.clear()


def test_a_search_that_found_nobody_is_made_again(swarm: Swarm) -> None:
    key, reader = peers_key(RUN.identity), swarm.reader
    owner = RSASignatureValidator(swarm.identities[3].key).local_public_key
    assert swarm.store(swarm.nodes[3], swarm.identities[3])
    before = reader.get(key, latest=True).value[owner].expiration_time
    reader.run_coroutine(_avoid_all)
    assert swarm.store(swarm.nodes[3], swarm.identities[3])
    assert reader.get(key, latest=True).value[owner].expiration_time == before, "it avoids all"
    reader.run_coroutine(_avoid_nobody)
    assert reader.get(key, latest=True).value[owner].expiration_time > before

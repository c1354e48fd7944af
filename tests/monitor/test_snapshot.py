"""The numbers of a snapshot, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from swarm import made

from tt_cli.identity.passes import Notice
from tt_cli.run import RunConfig, load_run
from tt_cli.swarm.records.peer_record import HistoryRecord
from tt_cli.swarm.records.snapshot import PEER_FIELDS, SNAPSHOT_FIELDS, SwarmSnapshot, take_snapshot

NOW = 1000.0  # as of the records that are made
record = partial(made.record, epoch=7, samples=0, samples_per_second=0.0, total_samples=0)


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return load_run("emoji").replaced({"swarm.target_batch_size": 256, "schedule.total_steps": 100})


def test_shares_samples_and_time_to_the_next_step(run: RunConfig) -> None:
    records = [
        record("a", samples=60, samples_per_second=30.0, loss=3.0, time=NOW - 4),
        record("b", samples=40, samples_per_second=10.0, loss=5.0),
        record("c", samples=99, samples_per_second=10.0, loss=9.0, epoch=5, digest="bb"),
    ]
    snapshot = take_snapshot(run, records, None, NOW)
    assert (snapshot.epoch, snapshot.trainers, snapshot.total_steps) == (7, 3, 100)
    assert snapshot.samples == 100  # c is behind: its samples belong to a step already made
    assert snapshot.samples_per_second == 50.0
    assert snapshot.eta_s == pytest.approx((256 - 100) / 50.0)
    assert snapshot.loss == 4.0
    peers = {peer.peer_id: peer for peer in snapshot.peers}
    assert [peers[name].share for name in "abc"] == pytest.approx([0.6, 0.2, 0.2])
    assert [peers[name].lag for name in "abc"] == [0, 0, 2]
    assert peers["a"].age_s == 4.0


def test_inner_steps_are_summed_over_those_at_the_newest_step(run: RunConfig) -> None:
    steps = {"a": (7, 5), "b": (7, 0), "c": (5, 40)}
    records = [record(name, epoch=epoch, inner_steps=made) for name, (epoch, made) in steps.items()]
    local = run.replaced({"optimizer": {"name": "local", "inner_batch": 20}})
    snapshot = take_snapshot(local, [*records, record("helper", role="aux")], None, NOW)
    assert (snapshot.inner_steps, snapshot.inner_steps_due) == (5, 13), "256 examples are 12.8 inner steps of 20"
    assert [peer.inner_steps for peer in snapshot.peers] == [5, 0, 40, None]
    averaged = take_snapshot(run, [record("a")], None, NOW)
    assert (averaged.inner_steps, averaged.inner_steps_due) == (None, None)


def test_an_enough_filled_step_is_due_now(run: RunConfig) -> None:
    snapshot = take_snapshot(run, [record("a", samples=300, samples_per_second=2.0)], None, NOW)
    assert snapshot.eta_s == 0.0


def test_a_run_that_its_organiser_paused_says_why_and_expects_no_step(run: RunConfig) -> None:
    notice = Notice(run.identity, 1, NOW, frozenset(), frozenset(), "new data are coming", None)
    records = [record("a", samples_per_second=2.0)]
    paused, running = (take_snapshot(run, records, None, NOW, known) for known in (notice, replace(notice, paused="")))
    assert (paused.paused, paused.eta_s, paused.seconds_left) == ("new data are coming", None, None)
    assert running == take_snapshot(run, records, None, NOW) and not running.paused and running.eta_s


def test_auxiliary_peers_are_listed_but_not_counted(run: RunConfig) -> None:
    records = [
        record("helper", role="aux", epoch=8, samples=5, samples_per_second=5.0, total_samples=10**6),
        record("a", samples_per_second=4.0, total_samples=1),
        record("b", samples_per_second=4.0, total_samples=9),
    ]
    snapshot = take_snapshot(run, records, None, NOW)
    assert [peer.peer_id for peer in snapshot.peers] == ["b", "a", "helper"]
    assert (snapshot.epoch, snapshot.samples, snapshot.samples_per_second, snapshot.trainers) == (7, 0, 8.0, 2)
    assert (snapshot.peers[2].share, snapshot.peers[2].lag) == (0.0, 0)


def test_only_an_auxiliary_peer(run: RunConfig) -> None:
    history = HistoryRecord(steps=[(6, 3.0, 10.0), (7, 2.5, 20.0)])
    snapshot = take_snapshot(run, [record("helper", role="aux")], history, NOW)
    assert (snapshot.epoch, snapshot.trainers, snapshot.eta_s, snapshot.digest) == (7, 0, None, "aa")
    assert snapshot.loss == 2.5  # the last that anyone remembers
    assert snapshot.history == [(6, 3.0, 10.0), (7, 2.5, 20.0)]


def test_an_empty_swarm(run: RunConfig) -> None:
    snapshot = take_snapshot(run, [], None, NOW)
    assert (snapshot.epoch, snapshot.trainers, snapshot.samples, snapshot.samples_per_second) == (0, 0, 0, 0)
    assert (snapshot.eta_s, snapshot.loss, snapshot.digest, snapshot.peers) == (None, None, "", [])


@pytest.mark.parametrize(
    ("digests", "majority", "agree"),
    [
        ("aa aa bb", "aa", [True, True, False]),
        ("aa", "aa", [True]),
        ("aa bb", "", [False, False]),
        ("aa aa bb bb cc", "", [False] * 5),
    ],
)
def test_agreement_is_with_the_majority(run: RunConfig, digests: str, majority: str, agree: list[bool]) -> None:
    records = [record(str(i), digest=digest) for i, digest in enumerate(digests.split())]
    snapshot = take_snapshot(run, records, None, NOW)
    assert snapshot.digest == majority
    assert [peer.in_agreement for peer in snapshot.peers] == agree


def test_how_many_of_the_newest_step_hold_one_state(run: RunConfig) -> None:
    records = [
        record("a", resynced_chunks=2),
        record("b"),
        record("c", digest="bb", resynced_chunks=3),
        record("d", epoch=6, digest="cc"),
        record("e", role="aux", digest=""),
    ]
    snapshot = take_snapshot(run, records, None, NOW)
    assert (snapshot.digest, snapshot.holders, snapshot.agreeing, snapshot.resynced_chunks) == ("aa", 3, 2, 5)
    assert {peer.peer_id: peer.resynced_chunks for peer in snapshot.peers} == dict(a=2, b=0, c=3, d=0, e=0)


def test_peers_are_compared_with_those_of_the_same_step_alone(run: RunConfig) -> None:
    records = [
        record("a"),
        record("b"),
        record("c", epoch=6, digest="bb"),
        record("d", epoch=0, digest=""),  # has no state yet
    ]
    snapshot = take_snapshot(run, records, None, NOW)
    assert [peer.in_agreement for peer in snapshot.peers] == [True, True, True, False]


def test_wrong_records_do_not_move_the_loss_or_break_the_json(run: RunConfig) -> None:
    records = [
        record("a", loss=3.0, samples_per_second=5e-324),
        record("b", loss=1e38),
        record("c", loss=9e38),
        record("d", loss=-50.0),
    ]
    history = HistoryRecord(steps=[(1, 1e38, 1.0), (2, 4.0, 2.0)])
    snapshot = take_snapshot(run, records, history, NOW)
    assert (snapshot.loss, snapshot.eta_s, snapshot.history) == (3.0, None, [(2, 4.0, 2.0)])
    json.dumps(snapshot.to_json(), allow_nan=False)


def test_the_json_is_what_the_help_says(run: RunConfig) -> None:
    history = HistoryRecord(steps=[(6, 3.0, 10.0)])
    snapshot = take_snapshot(run, [record("a", user="anna\x9b1m", loss=2.0)], history, NOW)
    text = json.dumps(snapshot.to_json(), allow_nan=False)
    assert text.isascii() and text.isprintable()
    read = json.loads(text)
    assert read == snapshot.to_json()
    assert list(read) == list(SNAPSHOT_FIELDS)
    assert list(read["peers"][0]) == list(PEER_FIELDS)
    assert SwarmSnapshot(**{**read, "peers": snapshot.peers, "history": [(6, 3.0, 10.0)]}) == snapshot


def test_who_is_clipped_or_accused_is_counted_by_those_who_say_so(run: RunConfig) -> None:
    records = [
        record("a", clipped=["b", "a", "b"], accused=["c"]),
        record("b", clipped=["a"], accused=["c", "nobody"]),
        record("c"),
    ]
    peers = {peer.peer_id: peer for peer in take_snapshot(run, records, None, NOW).peers}
    assert [(peers[name].clipped_by, peers[name].accused_by) for name in "abc"] == [(1, 0), (1, 0), (0, 2)]

"""Which trainers count as part of the swarm, when the DHT shows them and when it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from swarm.made import SteppedClock, record

from tt_cli.run import load_run
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.records import publisher as room
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, clock: SteppedClock) -> PeerDirectory:
    monkeypatch.setattr(room, "RSASignatureValidator", lambda key: SimpleNamespace(local_public_key=b""))
    identity: Any = SimpleNamespace(key=None, peer_id="me")
    run = load_run("emoji").replaced({"swarm.statistics_expiration": 60.0})
    dht: Any = SimpleNamespace(membership=Admission(run))
    return PeerDirectory(run, dht, identity, clock=clock)


def see(board: PeerDirectory, *records: PeerRecord) -> None:
    board._count_trainers(room.SwarmState.of(board._remember(records)))


def test_a_trainer_counts_for_as_long_again_as_its_record(board: PeerDirectory, clock: SteppedClock) -> None:
    see(board, record("a"), record("b"), record("x", role="aux"))
    assert board.trainers() == {"a", "b"}
    clock.now += 59
    see(board, record("a", time=1059.0))
    assert board.trainers() == {"a", "b"}
    clock.now += 58  # b's record has expired, and is not forgotten
    see(board)
    assert board.trainers() == {"a", "b"}
    clock.now += 61
    see(board)
    assert board.trainers() == set()


def test_who_says_goodbye_does_not_count(board: PeerDirectory) -> None:
    see(board, record("a"), record("b"))
    see(board, record("b", left=True, time=record("b").time + 1))
    assert board.trainers() == {"a"}


def test_a_goodbye_is_remembered_until_the_peer_comes_back(board: PeerDirectory, clock: SteppedClock) -> None:
    see(board, record("a"), record("b"))
    assert board.parted() == set()
    see(board, record("b", left=True, time=1001.0))
    clock.now += 1000  # the record has expired long since
    see(board, record("a", time=2000.0))
    assert board.parted() == {"b"}
    see(board, record("b", time=2001.0))
    assert board.parted() == set()


def test_who_is_on_the_way_in_does_not_count_and_who_is_late_does(board: PeerDirectory) -> None:
    see(board, record("a", epoch=5), record("late", epoch=4), record("new", epoch=0))
    assert board.trainers() == {"a", "late"}


def test_members_of_a_round_count_though_nobody_sees_their_records(board: PeerDirectory, clock: SteppedClock) -> None:
    board.met(["c", "d"])
    see(board, record("a"))
    assert board.trainers() == {"a", "c", "d"}
    clock.now += 61
    see(board)
    assert not board.trainers() & {"c", "d"}

"""What a peer's own account of its work counts for."""

from __future__ import annotations

import math

import pytest
from swarm.made import SteppedClock, record

from tt_cli.swarm.records.claim_limits import ClaimLimits, boasting
from tt_cli.swarm.records.peer_record import PeerRecord


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def accounts(clock: SteppedClock) -> ClaimLimits:
    return ClaimLimits(clock)


def honest(epoch: int = 5, samples: int = 0) -> list[PeerRecord]:
    """Four samples a second each; "me" is the one who looks."""
    names = ("me", "b", "c", "d")
    return [record(name, epoch=epoch, samples=samples, samples_per_second=4.0, micro_batch=4) for name in names]


def liar(epoch: int = 5, **lies: object) -> PeerRecord:
    return record(
        "liar", **{"epoch": epoch, "samples_per_second": 1e12, "samples": 10**12, "micro_batch": 10**9} | lies
    )


def samples(records: list[PeerRecord]) -> dict[str, int]:
    return {one.peer_id: one.samples for one in records}


@pytest.mark.parametrize("lie", [{"samples": 10**12}, {"samples_per_second": 1e12}], ids=str)
def test_who_claims_what_nobody_can_have_done_is_known(lie: dict[str, float]) -> None:
    fast = record("fast", samples=50_000, samples_per_second=5000.0)
    assert boasting([*honest(), fast, record("boaster", **lie)], 80) == {"boaster"}


def test_honest_accounts_are_believed(accounts: ClaimLimits, clock: SteppedClock) -> None:
    for epoch in range(5, 9):
        for second in range(0, 30, 3):
            found = accounts.bounded(honest(epoch, samples=4 * second), "me")
            assert samples(found) == dict.fromkeys(("me", "b", "c", "d"), 4 * second)
            clock.now += 3


def test_a_faster_peer_is_believed_too(accounts: ClaimLimits, clock: SteppedClock) -> None:
    accounts.bounded(honest(), "me")
    for second in range(0, 60, 2):
        fast = record("fast", samples=60 * second, samples_per_second=60.0, micro_batch=32)
        assert samples(accounts.bounded([*honest(), fast], "me"))["fast"] == 60 * second
        clock.now += 2


def test_who_was_there_before_may_have_computed_for_long(accounts: ClaimLimits) -> None:
    assert samples(accounts.bounded(honest(samples=5000), "me"))["b"] == 5000
    late = [*honest(samples=5000), record("late", samples=5000, samples_per_second=4.0)]
    assert samples(accounts.bounded(late, "me"))["late"] < 100


def test_who_comes_back_knows_how_much_the_others_believe_of_what_piled_up(
    accounts: ClaimLimits, clock: SteppedClock
) -> None:
    """They have made many steps without it, and would refuse what claims an hour's work as that of one step."""
    own = ClaimLimits(clock)
    back = {"samples": 14_400, "samples_per_second": 4.0, "micro_batch": 4}
    accounts.bounded([*honest(), record("back", **back)], "me")
    own.bounded([*honest(), record("back", **back)], "back")
    assert own.most == math.inf, "where it was all the time nobody knows how much there was before"
    clock.now += 3600
    accounts.bounded(honest(60), "me")
    for second in range(0, 30, 3):
        there = [*honest(60, samples=4 * second), record("back", epoch=60, **back)]
        own.bounded(there, "back")
        assert samples(accounts.bounded(there, "me"))["back"] == int(own.most) < 400
        clock.now += 3


@pytest.mark.parametrize("lie", [{}, {"samples_per_second": 0.0}, {"micro_batch": 0}], ids=str)
def test_a_liar_counts_for_no_more_than_time_allows(
    accounts: ClaimLimits, clock: SteppedClock, lie: dict[str, object]
) -> None:
    accounts.bounded(honest(), "me")
    for second in range(60):
        found = accounts.bounded([*honest(samples=4 * second), liar(**lie)], "me")
        assert samples(found)["liar"] <= 64 + 1.5 * 64 * (second + 1)
        assert next(one for one in found if one.peer_id == "liar").samples_per_second <= 64.0
        clock.now += 1


def test_who_does_not_come_to_its_rounds_is_not_counted_until_it_does(
    accounts: ClaimLimits, clock: SteppedClock
) -> None:
    accounts.bounded(honest(), "me")
    for epoch in range(5, 9):
        clock.now += 10
        counted = samples(accounts.bounded([*honest(epoch, samples=20), liar(epoch)], "me"))["liar"]
        assert (counted > 0) == (epoch == 5), "it began one round early"
        accounts.met(["me", "b", "c", "d"])
    clock.now += 10
    accounts.met(["me", "b", "c", "d", "liar"])
    assert samples(accounts.bounded([*honest(9), liar(9)], "me"))["liar"] > 0
    accounts.met(["me", "b", "c", "d"])
    accounts.bounded(honest(9), "me")
    assert not accounts._owing, "who has gone is forgotten"


def test_who_computes_nothing_itself_counts_those_who_owe_it_a_round(
    accounts: ClaimLimits, clock: SteppedClock
) -> None:
    """Else it would never come to the round of the only one that computes."""
    me, other = record("me", samples_per_second=0.0), record("b", samples=8, samples_per_second=4.0, micro_batch=4)
    accounts.bounded([me, other], "me")
    accounts.met(["me"])
    clock.now += 10
    assert samples(accounts.bounded([me, other], "me"))["b"] == 8
    busy = record("me", samples_per_second=4.0)
    accounts.met(["me"])
    assert samples(accounts.bounded([busy, other], "me"))["b"] == 0


def test_who_claims_nothing_owes_nothing(accounts: ClaimLimits, clock: SteppedClock) -> None:
    """As who has just begun, or is at another step."""
    others = [record("idle", samples=0), record("late", epoch=4, samples=8)]
    accounts.bounded([*honest(), *others], "me")
    accounts.met(["me", "b", "c", "d"])
    clock.now += 10
    found = samples(accounts.bounded([*honest(6), record("idle", epoch=6), record("late", epoch=6)], "me"))
    assert found["idle"] == found["late"] == 10


def test_auxiliary_peers_and_ones_own_record_are_left_as_they_are(accounts: ClaimLimits) -> None:
    mine = record("me", samples=10**9, samples_per_second=1e9)
    aux = record("x", role="aux", samples_per_second=7.0)
    assert accounts.bounded([aux, mine], "me") == [aux, mine]
    assert accounts.bounded([], "me") == []

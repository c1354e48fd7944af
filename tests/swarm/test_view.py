"""What follows from the members' records."""

from __future__ import annotations

import statistics
from fractions import Fraction

import pytest
from swarm.made import SteppedClock, record

from tt_cli.swarm.records.consensus import FASTER, SwarmState, Vote, _middle, enough, voices
from tt_cli.swarm.records.peer_record import PeerRecord


def state(view: SwarmState) -> tuple[int, str]:
    return view.epoch, view.digest


def test_nobody_holds_nothing() -> None:
    view = SwarmState.of([])
    assert state(view) == (0, "")
    assert (view.records, view.donors(), view.members(0, ""), view.late(0, "")) == ((), [], [], [])
    assert view.samples_per_second() == 0.0


def test_the_foremost_epoch_counts_and_in_it_the_majority() -> None:
    view = SwarmState.of(
        [
            record("a", epoch=5, digest="aa"),
            record("b", epoch=6, digest="bb"),
            record("c", epoch=6, digest="cc"),
            record("d", epoch=6, digest="bb"),
            record("e", epoch=5, digest="aa"),
            record("f", epoch=5, digest="aa"),
        ]
    )
    assert state(view) == (6, "bb")
    assert view.donors() == ["b", "d"]


def test_a_tie_is_decided_alike_by_all() -> None:
    records = [record("a", digest="bb"), record("b", digest="aa"), record("c", digest="cc")]
    assert state(SwarmState.of(records)) == state(SwarmState.of(reversed(records))) == (5, "aa")


def test_only_who_holds_the_same_state_averages_together() -> None:
    view = SwarmState.of(
        [
            record("a", samples=1),
            record("b", samples=20, client_mode=True),
            record("c", samples=300, digest="bb"),
            record("d", samples=4000, epoch=4),
            record("e", samples=50000, role="aux"),
        ]
    )
    assert [one.peer_id for one in view.members(5, "aa")] == ["a", "b"]
    assert [one.peer_id for one in view.late(5, "aa")] == ["d"]
    assert not view.late(4, "aa")


def test_who_alone_holds_a_state_waits_for_all_that_are_behind() -> None:
    view = SwarmState.of([record("me", epoch=9), record("b"), record("aux", role="aux", epoch=9), record("c", epoch=1)])
    assert [one.peer_id for one in view.late(9, "aa")] == ["b", "c"]
    company = SwarmState.of([*view.records, record("d", epoch=9), record("e", epoch=8)])
    assert [one.peer_id for one in company.late(9, "aa")] == ["e"]


def test_a_peer_in_client_mode_is_ahead_for_nobody_while_others_can_hand_over() -> None:
    ahead = record("client", epoch=9, digest="cc", client_mode=True)
    assert state(SwarmState.of([ahead, record("a")])) == (5, "aa")
    assert SwarmState.of([ahead, record("a")]).donors() == ["a"]
    assert state(SwarmState.of([ahead, record("a", role="aux")])) == (5, "aa")


def test_peers_in_client_mode_alone_count_though_none_can_hand_over() -> None:
    view = SwarmState.of([record("client", client_mode=True), record("aux", role="aux", epoch=0, digest="")])
    assert state(view) == (5, "aa")
    assert view.donors() == []


def test_trainers_come_before_the_auxiliary_peers_of_their_epoch_but_not_of_a_later_one() -> None:
    auxiliary = [record("x", role="aux", digest="cc"), record("y", role="aux", digest="cc")]
    assert state(SwarmState.of([*auxiliary, record("a")])) == (5, "aa")
    assert state(SwarmState.of([record("x", role="aux", epoch=9, digest="cc"), record("a")])) == (9, "cc")
    assert SwarmState.of([record("x", role="aux"), record("a"), record("y", role="aux")]).donors() == ["a", "x", "y"]


def test_an_auxiliary_peer_keeps_the_state_when_all_trainers_have_gone() -> None:
    view = SwarmState.of([record("x", role="aux", epoch=7, digest="bb"), record("y", role="aux", epoch=0, digest="")])
    assert state(view) == (7, "bb")
    assert view.donors() == ["x"]
    assert state(SwarmState.of([record("y", role="aux", epoch=0, digest="")])) == (0, "")


def test_trainers_without_a_state_hold_nothing() -> None:
    view = SwarmState.of([record("a", epoch=9, digest=""), record("b")])
    assert state(view) == (5, "aa")


def test_the_speed_is_that_of_the_trainers() -> None:
    records = [
        record("a", samples_per_second=2.5),
        record("b", samples_per_second=4.0, epoch=1, client_mode=True),
        record("x", samples_per_second=100.0, role="aux"),
    ]
    assert SwarmState.of(records).samples_per_second() == 6.5


def voter(peer_id: str, **changes: object) -> PeerRecord:
    return record(peer_id, **{"vote": True, **changes})


def test_what_half_of_the_voters_signed_is_the_swarms_state() -> None:
    everybody = [voter(name) for name in "abc"]
    assert state(SwarmState.of(everybody)) == (5, "aa")
    ahead = voter("a", epoch=6, digest="bb")
    assert state(SwarmState.of([ahead, *everybody[1:]])) == (5, "aa"), "one of three has stepped"
    two_ahead = [ahead, voter("b", epoch=6, digest="bb"), everybody[2]]
    assert state(SwarmState.of(two_ahead)) == (6, "bb")
    assert SwarmState.of(two_ahead).donors() == ["a", "b"]


def test_of_two_the_one_ahead_is_followed() -> None:
    assert state(SwarmState.of([voter("a"), voter("b", epoch=6, digest="bb")])) == (6, "bb")
    assert state(SwarmState.of([voter("a"), voter("b", digest="bb")])) == (5, "aa"), "both decide alike"


@pytest.mark.parametrize("epoch", [0, 3, 6, 7, 12, 10**9])
@pytest.mark.parametrize("honest", [2, 3, 7])
def test_one_liar_moves_nobody(honest: int, epoch: int) -> None:
    records = [voter(f"h{number}") for number in range(honest)]
    view = SwarmState.of([*records, voter("liar", epoch=epoch, digest="00")])
    assert state(view) == (5, "aa") and "liar" not in view.donors()
    assert not view.leads(5, "aa")
    assert view.leads(4, "99") and view.leads(0, "fresh")
    counted = {one.peer_id for one in view.trainers()}
    assert counted - {"liar"} == {one.peer_id for one in records}
    assert ("liar" in counted) == (epoch in (4, 5, 6)), "who is nowhere near does not count"


@pytest.mark.parametrize("lie", [(5, "00"), (6, "00"), (4, "00"), (900, "00")])
def test_nor_do_three_of_ten(lie: tuple[int, str]) -> None:
    liars = [voter(f"l{number}", epoch=lie[0], digest=lie[1]) for number in range(3)]
    for stepped in range(8):
        honest = [voter(f"h{n}", epoch=5 + (n < stepped), digest="bb" if n < stepped else "aa") for n in range(7)]
        assert SwarmState.of([*honest, *liars]).digest in {"aa", "bb", ""}


def test_one_liar_does_not_stop_two_of_whom_one_is_a_step_ahead() -> None:
    two = [voter("a", epoch=6, digest="bb"), voter("b")]
    for epoch in (0, 3, 8, 900):
        assert state(SwarmState.of([*two, voter("liar", epoch=epoch, digest="00")])) == (6, "bb")


def test_a_crowd_of_newcomers_does_not_vote() -> None:
    newcomers = [record(f"n{number}", epoch=0, digest="f0") for number in range(9)]
    returning = [record(f"r{number}", epoch=3, digest="0d") for number in range(9)]
    view = SwarmState.of([voter("a"), voter("b"), *newcomers, *returning])
    assert state(view) == (5, "aa")
    assert {one.peer_id for one in view.trainers()} == {"a", "b"}


def test_while_they_disagree_nobody_is_behind() -> None:
    apart = SwarmState.of([voter("a", epoch=5), voter("b", epoch=6, digest="bb"), voter("c", epoch=6, digest="cc")])
    assert state(apart) == (6, "") and apart.donors() == []
    assert not any(apart.leads(*one) for one in ((0, "x"), (5, "aa"), (6, "cc"), (9, "dd")))
    assert len(apart.trainers()) == 3


def test_nobody_goes_back_to_what_one_of_many_holds_because_it_is_in_the_middle() -> None:
    """Of four, two made steps while the others stood still, each at its own step; one of the two does not vote."""
    asleep = [voter("a", epoch=6, digest="66"), voter("b", epoch=9, digest="99")]
    awake = [voter("c", epoch=12, digest="cc"), record("d", epoch=12, digest="cc")]
    view = SwarmState.of([*asleep, *awake])
    assert state(view) == (9, "99") and not view.leads(12, "cc") and view.leads(6, "66")
    assert SwarmState.of([*asleep, voter("e", epoch=9, digest="99"), *awake]).leads(12, "cc"), "half of all hold it"


def test_one_that_votes_alone_after_an_order_to_go_back_does_not_undo_it() -> None:
    """Nobody else votes before its first step: until then those who voted before count for the state of the order."""
    absent = [record(name, epoch=10, digest="aa", vote=True) for name in "abcde"]
    back = [record(name, epoch=10, digest="aa") for name in "ab"]
    defies = record("e", epoch=50, digest="ee", vote=True)
    assert state(SwarmState.of([defies, *back])) == (50, "ee")
    first = SwarmState.of([defies, *back], absent)
    assert state(first) == (10, "aa") and not first.leads(10, "aa") and first.donors() == ["a", "b"]
    alone = SwarmState.of([defies], absent)
    assert state(alone) == (10, "aa") and not alone.donors(), "though nobody can hand it over yet"
    went_on = [record(name, epoch=11, digest="bb", vote=True) for name in "abc"]
    assert state(SwarmState.of([defies, *went_on[:1], *back[1:]], absent)) == (10, "aa")
    assert state(SwarmState.of([defies, *went_on], absent)) == (11, "bb")
    elsewhere = [record(name, epoch=11, digest="bb") for name in "cd"]
    assert {one.peer_id for one in SwarmState.of([defies, *back, *elsewhere], absent).absent} == {"a", "b"}


def test_who_is_far_ahead_of_all_others_comes_back() -> None:
    view = SwarmState.of([voter("a"), voter("b"), voter("me", epoch=9, digest="dd")])
    assert view.leads(9, "dd") and not view.leads(7, "dd"), "a late look at the records explains two steps"


def test_a_vote_in_client_mode_is_for_what_somebody_can_hand_over() -> None:
    clients = [voter(f"c{number}", client_mode=True) for number in range(3)]
    assert state(SwarmState.of([*clients, voter("a")])) == (5, "aa")
    assert state(SwarmState.of([*clients, voter("liar", epoch=6, digest="00")])) == (6, "00")
    held = [*clients, voter("liar", epoch=6, digest="00"), record("x", role="aux")]
    assert state(SwarmState.of(held)) == (5, "aa"), "an auxiliary peer has what they signed"


def test_no_speed_counts_for_more_than_some_times_the_middle() -> None:
    honest = [record(name, samples_per_second=2.0) for name in "abc"]
    view = SwarmState.of([*honest, record("liar", samples_per_second=1e12)])
    assert view.samples_per_second() == 6.0 + FASTER * 2.0
    assert SwarmState.of([record("a", samples_per_second=0.0)]).samples_per_second() == 0.0


def test_who_computes_votes_until_it_takes_a_state_over() -> None:
    vote = Vote(60.0, 60.0, SteppedClock(0.0))
    assert not vote.of(record(total_samples=0)), "it may be about to take one over"
    assert not vote.of(record()), "with a backup too: the others may have gone on without it"
    vote.stepped(5, "aa")
    assert vote.of(record()) and not vote.of(record(total_samples=0))
    assert not vote.of(record(epoch=9, digest="bb")), "it took this one over"
    vote.stepped(10, "cc")
    assert vote.of(record(epoch=10, digest="cc"))
    assert vote.of(record(epoch=10, digest="cc", samples=99))
    assert not vote.of(record(epoch=9, digest="bb")), "rolled back"
    assert not vote.of(record(role="aux")) and not Vote(60.0, 60.0).of(record(digest=""))


def test_a_step_that_shows_before_it_is_told_counts() -> None:
    """The training thread publishes too, between the step and the word of it."""
    vote = Vote(60.0, 60.0, SteppedClock(0.0))
    vote.of(record())
    assert not vote.of(record(epoch=6, digest="bb"))
    vote.stepped(6, "bb")
    assert vote.of(record(epoch=6, digest="bb"))


def test_who_was_away_does_not_vote_before_its_next_step() -> None:
    clock = SteppedClock(0.0)
    vote = Vote(60.0, 600.0, clock)
    vote.of(record())
    vote.stepped(5, "aa")
    vote.stored()
    for seconds, votes in ((50.0, True), (59.0, True), (61.0, False), (1.0, False)):
        clock.now += seconds
        vote.about_to_store()
        assert vote.of(record()) == votes
        vote.stored()
    vote.stepped(6, "bb")
    assert vote.of(record(epoch=6, digest="bb"))


def test_who_stood_still_does_not_vote_before_its_next_step_and_whose_line_was_busy_does() -> None:
    clock = SteppedClock(0.0)
    vote = Vote(60.0, 20.0, clock)
    vote.of(record())
    vote.stepped(5, "aa")
    vote.about_to_store()
    vote.stored()
    for seconds, votes in ((15.0, True), (15.0, True), (21.0, False)):  # each time the DHT did not answer
        clock.now += seconds
        vote.about_to_store()
        assert vote.of(record()) == votes


def closed(peer_id: str, user: str, **changes: object) -> PeerRecord:
    """A record as members of a closed run read it: the user is the one whom its pass names."""
    return record(peer_id, user=user, pass_text="pass", vote=True, **changes)


def test_a_user_of_a_closed_run_has_one_voice_however_many_peers_it_has() -> None:
    liars = [closed(f"liar{n}", "Mallory" if n % 2 else "mallory", epoch=9, digest="ee") for n in range(4)]
    honest = [closed(name, name) for name in "abc"]
    assert voices([*honest, *liars]) == dict.fromkeys("abc", 1) | {one.peer_id: Fraction(1, 4) for one in liars}
    assert state(SwarmState.of([*honest, *liars])) == (5, "aa") == state(SwarmState.of([*liars, *honest]))
    assert enough(2, [*honest, *liars]) and not enough(1, [*honest, *liars])


def test_in_an_open_run_each_peer_has_a_voice_whatever_user_it_says_to_be() -> None:
    records = [record(name, user="ada", vote=True) for name in "abc"]
    assert voices(records) == dict.fromkeys("abc", 1)


@pytest.mark.parametrize("epochs", [(5,), (5, 6), (4, 5, 6), (5, 5, 6, 6), (4, 4, 5, 6, 6)])
def test_the_middle_of_voters_with_one_voice_each_is_their_later_median(epochs: tuple[int, ...]) -> None:
    records = [record(f"{number}", epoch=epoch, vote=True) for number, epoch in enumerate(epochs)]
    assert _middle(records) == statistics.median_high(epochs)

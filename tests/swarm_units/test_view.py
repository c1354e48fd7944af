"""What follows from the members' records."""

from __future__ import annotations

from swarm_units.made import record

from tt_cli.swarm.board import View


def state(view: View) -> tuple[int, str]:
    return view.epoch, view.digest


def test_nobody_holds_nothing() -> None:
    view = View.of([])
    assert state(view) == (0, "")
    assert (view.records, view.donors(), view.members(0, ""), view.late(0)) == ((), [], [], [])
    assert view.samples_per_second() == 0.0


def test_the_foremost_epoch_counts_and_in_it_the_majority() -> None:
    view = View.of(
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
    assert state(View.of(records)) == state(View.of(reversed(records))) == (5, "aa")


def test_only_who_holds_the_same_state_averages_together() -> None:
    view = View.of(
        [
            record("a", samples=1),
            record("b", samples=20, client_mode=True),
            record("c", samples=300, digest="bb"),
            record("d", samples=4000, epoch=4),
            record("e", samples=50000, role="aux"),
        ]
    )
    assert [one.peer_id for one in view.members(5, "aa")] == ["a", "b"]
    assert [one.peer_id for one in view.late(5)] == ["d"]
    assert view.late(4) == view.late(7) == []


def test_a_peer_in_client_mode_is_ahead_for_nobody_while_others_can_hand_over() -> None:
    ahead = record("client", epoch=9, digest="cc", client_mode=True)
    assert state(View.of([ahead, record("a")])) == (5, "aa")
    assert View.of([ahead, record("a")]).donors() == ["a"]
    assert state(View.of([ahead, record("a", role="aux")])) == (5, "aa")


def test_peers_in_client_mode_alone_count_though_none_can_hand_over() -> None:
    view = View.of([record("client", client_mode=True), record("aux", role="aux", epoch=0, digest="")])
    assert state(view) == (5, "aa")
    assert view.donors() == []


def test_trainers_come_before_the_auxiliary_peers_of_their_epoch_but_not_of_a_later_one() -> None:
    auxiliary = [record("x", role="aux", digest="cc"), record("y", role="aux", digest="cc")]
    assert state(View.of([*auxiliary, record("a")])) == (5, "aa")
    assert state(View.of([record("x", role="aux", epoch=9, digest="cc"), record("a")])) == (9, "cc")
    assert View.of([record("x", role="aux"), record("a"), record("y", role="aux")]).donors() == ["a", "x", "y"]


def test_an_auxiliary_peer_keeps_the_state_when_all_trainers_have_gone() -> None:
    view = View.of([record("x", role="aux", epoch=7, digest="bb"), record("y", role="aux", epoch=0, digest="")])
    assert state(view) == (7, "bb")
    assert view.donors() == ["x"]
    assert state(View.of([record("y", role="aux", epoch=0, digest="")])) == (0, "")


def test_trainers_without_a_state_hold_nothing() -> None:
    view = View.of([record("a", epoch=9, digest=""), record("b")])
    assert state(view) == (5, "aa")


def test_the_speed_is_that_of_the_trainers() -> None:
    records = [
        record("a", samples_per_second=2.5),
        record("b", samples_per_second=4.0, epoch=1, client_mode=True),
        record("x", samples_per_second=100.0, role="aux"),
    ]
    assert View.of(records).samples_per_second() == 6.5

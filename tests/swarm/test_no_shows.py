"""Who is expected in a round after it stayed away."""

from __future__ import annotations

import pytest
from swarm.made import record

from tt_cli.swarm.participants.no_shows import MOST_ROUNDS, NoShows


@pytest.fixture
def attendance() -> NoShows:
    return NoShows()


def test_who_stayed_away_once_is_expected_with_its_next_record(attendance: NoShows) -> None:
    attendance.ended({"b"}, {"a"}, [record("a"), record("b")])
    assert attendance.expects(record("a"))
    assert not attendance.expects(record("b")) and attendance.expects(record("b", time=1001.0))


def rounds_spoiled(attendance: NoShows, rounds: int) -> list[int]:
    """In which of so many rounds a peer is expected that renews its record all the time and never comes."""
    found = []
    for number in range(rounds):
        one = record("liar", time=1000.0 + number)
        expected = attendance.expects(one)
        found += [number] if expected else []
        attendance.ended({"liar"} if expected else set(), {"a", "b"}, [one])
    return found


def test_who_never_comes_is_expected_less_and_less(attendance: NoShows) -> None:
    assert rounds_spoiled(attendance, 40) == [0, 1, 3, 7, 15, 31]
    assert len(rounds_spoiled(attendance, 1000)) <= 1 + 1000 // MOST_ROUNDS


def test_who_comes_is_expected_again(attendance: NoShows) -> None:
    rounds_spoiled(attendance, 20)
    assert not attendance.expects(record("liar", time=2000.0))
    attendance.ended(set(), {"a", "b", "liar"}, [])
    assert attendance.expects(record("liar", time=2000.0))
    assert rounds_spoiled(attendance, 4) == [0, 1, 3]


def test_where_too_few_are_left_all_are_expected(attendance: NoShows) -> None:
    rounds_spoiled(attendance, 20)
    attendance.forgive()
    assert attendance.expects(record("liar"))
    attendance.ended({"liar"}, {"a"}, [])
    assert not attendance.expects(record("liar", time=9000.0)), "for longer than before"


def test_nobody_waits_at_every_step_for_one_that_is_always_late(attendance: NoShows) -> None:
    waits = 0
    for number in range(64):
        late = record("late", epoch=4, time=1000.0 + number)
        if attendance.expects(late):
            waits += 1
            attendance.strike([late.peer_id])
        attendance.ended(set(), {"a", "b"}, [])
    assert waits <= 7

"""What an observer takes for the state of the swarm."""

from __future__ import annotations

from swarm_units.made import record

from tt_cli.swarm.observer import _held, _printable


def test_of_each_step_the_digest_that_most_trainers_hold() -> None:
    records = [
        *(record(name, epoch=5, digest="aa") for name in "abc"),
        record("d", epoch=5, digest="bb"),
        *(record(name, epoch=6, digest="cc") for name in "ef"),
        *(record(name, epoch=6, digest="dd", role="aux") for name in "ghi"),
        record("j", epoch=4, digest="ee", role="aux"),
        record("k", epoch=7, digest="", role="aux"),
    ]
    assert _held(records) == {(5, "aa"), (6, "cc"), (4, "ee")}
    assert _held([]) == set()


def test_what_a_donor_says_cannot_move_the_cursor() -> None:
    assert _printable("no\x1b[2J\n\tstate\u202e yet") == "no [2J state yet"
    assert len(_printable("x" * 10_000)) == 200

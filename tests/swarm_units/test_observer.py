"""What an observer takes for the state of the swarm."""

from __future__ import annotations

from swarm_units.made import record

from tt_cli.swarm.observer import _held


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

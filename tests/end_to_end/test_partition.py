"""A network that falls into two halves, with real peers on hosts of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conftest import (
    WAIT,
    assert_agreed,
    committed,
    last_step,
    local_swarm,
    start_on_hosts,
    tiny_run,
    wait_for_step,
)
from testbed.namespaces import Network

from tt_cli.supervisor.events import Phase, Round
from tt_cli.supervisor.local_swarm import LocalPeer

NAMES = ("anna", "ben", "cleo", "dora")


def sought_in_vain(member: LocalPeer, since: int) -> bool:
    """True when after its first `since` events it waits for the rest, or two rounds have failed: it makes no step.

    Where a round that was under way ended in one half, the other one fails rounds, and that half waits.
    """
    told = member.events[since:]
    phases = [event.phase for event in told if isinstance(event, Phase)]
    failed = sum(event.outcome == "failed" for event in told if isinstance(event, Round))
    return failed >= 2 or phases[-1:] == ["waiting"]


@pytest.mark.promise(
    "Neither half of a divided swarm steps without the other, and together they go on",
    also="tests/swarm/test_selector.py",
)
@pytest.mark.netns
def test_neither_half_of_a_divided_swarm_steps_without_the_other(tmp_path: Path) -> None:
    # halves that have not heard of each other for twice as long go on apart, by the rules: not while this test waits
    life = {"statistics_expiration": WAIT}
    run = tiny_run(swarm={**life, "next_chunk_timeout": 4.0, "averaging_timeout": 12.0})
    with Network(hosts=len(NAMES)) as network, local_swarm(run, tmp_path) as swarm:
        trainers = start_on_hosts(network, swarm, *NAMES)
        together = min(map(last_step, trainers))  # before, who is up first may have made steps alone
        # who is two steps behind when it is cut off does not count: the others may be enough without it
        level = swarm.wait(
            lambda: (
                len({*map(last_step, trainers)}) == 1
                and all(len(committed(member)[-1].members) == len(NAMES) for member in trainers)
            ),
            WAIT,
        )
        assert level, [last_step(member) for member in trainers]

        network.split(network.hosts[:2], network.hosts[2:])
        seen = {member.name: len(member.events) for member in trainers}
        newest = max(map(last_step, trainers))
        sought = swarm.wait(lambda: all(sought_in_vain(m, seen[m.name]) for m in trainers), WAIT)
        told = {m.name: [e.reason for e in m.of(Phase)][-5:] for m in trainers}
        assert sought, f"a half went on: steps {[last_step(m) for m in trainers]}, {told}"
        # a round that was under way may have ended in one half
        assert max(map(last_step, trainers)) <= newest + 1
        assert_agreed(trainers, together)

        network.split()
        wait_for_step(swarm, max(map(last_step, trainers)) + 2, *NAMES)
        assert_agreed(trainers, together)

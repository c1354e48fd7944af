"""A trainer that loses the network for longer than the DHT remembers anybody, with real peers on hosts of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, last_step, local_swarm, start_on_hosts, tiny_run, wait_for_step
from testbed.namespaces import Network

from tt_cli.supervisor.events import Phase, Round, Synchronised, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer

NAMES = ("anna", "ben", "cleo")


def cut_off(member: LocalPeer) -> Trouble | None:
    """What it told when it noticed, once it is shown to wait for that reason."""
    told = [event for event in member.of(Trouble) if event.what == "connection"]
    shown = {event.reason for event in member.of(Phase) if event.phase == "waiting"}
    return next((trouble for trouble in told if trouble.words in shown), None)


@pytest.mark.promise(
    "A trainer that loses its network says so, makes no step alone, and comes back", also="tests/peer/test_stuck.py"
)
@pytest.mark.netns
def test_a_peer_that_is_cut_off_says_so_makes_no_step_of_its_own_and_comes_back(tmp_path: Path) -> None:
    short = {"statistics_expiration": 3.0, "next_chunk_timeout": 3.0, "averaging_timeout": 6.0}
    run = tiny_run(swarm=short)
    with Network(hosts=len(NAMES)) as network, local_swarm(run, tmp_path) as swarm:
        trainers = start_on_hosts(network, swarm, *NAMES)

        cleo = trainers[-1]
        before, held = len(cleo.events), last_step(cleo)
        network.split(network.hosts[-1:])
        assert swarm.wait(lambda: cut_off(cleo) is not None, WAIT), cleo.events[before:]
        trouble = cut_off(cleo)
        assert trouble is not None and trouble.words.startswith("cut off from the swarm: none of the ")
        assert "connects to all the peers that it knows again" in trouble.remedy
        assert swarm.wait(lambda: last_step(trainers[0]) >= held + 3, WAIT), "the others go on"

        network.split()
        back = swarm.wait(lambda: any(isinstance(e, Synchronised) for e in cleo.events[before:]), WAIT)
        assert back, cleo.events[before:]
        wait_for_step(swarm, last_step(cleo) + 2, *NAMES)
        assert_agreed(trainers, held)  # before, who is up first may have made steps alone
        alone = [e.epoch for e in cleo.events[before:] if isinstance(e, Round) and e.outcome == "alone"]
        assert not alone, "what it steps alone is lost, or undoes what the others did"

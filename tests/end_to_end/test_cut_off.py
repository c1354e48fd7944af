"""A trainer that loses the network for longer than the DHT remembers anybody, with real peers on hosts of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, last_step, local_swarm, start_on_hosts, tiny_run, wait_for_step
from testbed.namespaces import Host, Network

from tt_cli.supervisor.events import Phase, Round, Synchronised, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer
from tt_cli.swarm.network.tcp_counters import TCPConnection, connections_of

NAMES = ("anna", "ben", "cleo")
KEEPALIVE = 30.0  # seconds after which libp2p asks whether a connection still leads anywhere


def cut_off(member: LocalPeer) -> Trouble | None:
    """What it told when it noticed, once it is shown to wait for that reason."""
    told = [event for event in member.of(Trouble) if event.what == "connection"]
    shown = {event.reason for event in member.of(Phase) if event.phase == "waiting"}
    return next((trouble for trouble in told if trouble.words in shown), None)


def connections(host: Host, member: LocalPeer) -> list[TCPConnection]:
    """Those of its node."""
    with host.entered():
        return connections_of(member.worker.pid)


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
        assert connections(network.hosts[-1], cleo)
        network.split(network.hosts[-1:])
        silent = list[float]()

        def hung_up() -> bool:
            silent.extend(one.heard for one in connections(network.hosts[-1], cleo))
            return not connections(network.hosts[-1], cleo)

        assert swarm.wait(hung_up, WAIT) and max(silent) < KEEPALIVE
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

"""A peer that is asked to leave before it trains: it ends at once, whatever it does then."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, tiny_run
from testbed.fork_server import fork_server
from testbed.process_watch import ProcessWatch

from tt_cli.supervisor.events import Failure, Finished, Phase
from tt_cli.supervisor.local_swarm import LocalSwarm
from tt_cli.supervisor.processes import family_of
from tt_cli.swarm.network.dht_node import addresses_of, start_dht, stop_dht
from tt_cli.swarm.records.publisher import peers_key


@pytest.mark.parametrize("where", ["loading", "syncing"])
def test_who_is_asked_to_leave_before_it_trains_leaves_whatever_it_does(where: str, tmp_path: Path) -> None:
    run = tiny_run()
    node = start_dht(run, None, initial_peers=[], host="127.0.0.1")
    try:
        with LocalSwarm(run.to_toml(), tmp_path, launch=fork_server().launch) as swarm:
            swarm.addresses = addresses_of(node)
            anna = swarm.start_trainer("anna", module="testbed.starting", batch_size=4, where=where)
            hangs = swarm.wait(lambda: any(event.phase == "waiting" for event in anna.of(Phase)), WAIT)
            assert hangs, anna.worker.log.read_text()
            watch = ProcessWatch(family_of(anna.worker.pid))
            anna.worker.leave()
            assert anna.worker.wait(WAIT) == 0, "nothing had to end it"
            assert watch.left_after(WAIT) == set()
            assert swarm.wait(lambda: bool(anna.of(Finished)), WAIT) and not anna.of(Failure)
        found = node.get(peers_key(run.identity), latest=True)
        left = [record.value["left"] for record in found.value.values()] if found is not None else []
        assert left == ([True] if where == "syncing" else [])
    finally:
        stop_dht(node)


def test_so_does_an_assistant(tmp_path: Path) -> None:
    with LocalSwarm(tiny_run().to_toml(), tmp_path, launch=fork_server().launch) as swarm:
        assistant = swarm.start("assistant", "testbed.starting", {"where": "assisting"})
        hangs = swarm.wait(lambda: any(event.phase == "waiting" for event in assistant.of(Phase)), WAIT)
        assert hangs, assistant.worker.log.read_text()
        assistant.worker.leave()
        assert assistant.worker.wait(WAIT) == 0, "nothing had to end it"

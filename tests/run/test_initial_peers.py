"""Through whom a run's peers are found: flags, the run file, an aux peer on this machine, and members met before."""

from __future__ import annotations

import pytest

from tt_cli.errors import UsageError
from tt_cli.run import folders, load_run
from tt_cli.run.initial_peers import initial_peers, peers_here, peers_to_ask, remember_met
from tt_cli.supervisor.slot import AUX, claim_slot

NAMED, HERE, MET, GIVEN = (
    f"/ip4/203.0.113.{n}/tcp/31337/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8" for n in range(4)
)


def test_members_met_before_are_asked_beside_those_that_nobody_had_to_name() -> None:
    run = load_run("emoji")
    folder = folders.run_folder(run)
    remember_met(folder, [MET])
    with pytest.raises(UsageError, match="no peer of run emoji is known to ask"):
        peers_to_ask(run, [], "emoji")
    (folder / "address").write_text(f"{HERE}\n")
    assert (peers_here(run), peers_to_ask(run, [], "emoji")) == ([HERE], [HERE, MET])
    named = run.replaced({"peers.initial": [NAMED]})
    assert folders.run_folder(named) == folder
    assert (initial_peers(named, []), peers_to_ask(named, [], "emoji")) == ([NAMED], [NAMED, MET])
    assert peers_to_ask(named, [GIVEN], "emoji") == [GIVEN], "that one alone"
    with pytest.raises(UsageError, match="--peer nowhere: is no multiaddr"):
        peers_to_ask(named, ["nowhere"], "emoji")


def test_what_an_aux_peer_left_when_it_was_killed_is_nobodys_address() -> None:
    """`tt join RUN --new-swarm` would go there, and begin none."""
    run = load_run("emoji")
    (folders.run_folder(run) / "address").write_text(f"{HERE}\n")
    slot = claim_slot(folders.run_folder(run), AUX)
    assert peers_here(run) == [HERE]
    assert slot.lock is not None
    slot.lock.close()
    assert peers_here(run) == []

"""A closed run with real peers: a member that is banned, or whose pass runs out, is out while the others go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, local_swarm, tiny_run, wait_for_step

from scripts.lab.passes import Issuer
from tt_cli.identity.passes import CLOCK_LEEWAY
from tt_cli.supervisor.events import Listening, Synchronised

NAMES = ("anna", "ben", "cleo", "dora")
SHORT_SECONDS = 5.0


@pytest.mark.promise(
    "A banned trainer is out of the rounds, though only the aux peer hears of it from the authority",
    also="tests/swarm/test_door.py",
)
@pytest.mark.promise("A trainer whose pass has expired is out of the rounds", also="tests/swarm/test_membership.py")
def test_who_counts_no_more_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    """cleo is banned, of which only the auxiliary peer hears from the authority; dora's pass runs out."""
    issuer = Issuer()
    run = issuer.closed(tiny_run(schedule={"total_steps": 100_000}))
    with local_swarm(run, tmp_path) as swarm:
        issuer.admit(tmp_path / "aux", run, "aux", "organiser")
        swarm.start_aux()
        for seed, name in enumerate(NAMES):
            issuer.admit(tmp_path / name, run, "trainer", name)
            swarm.start_trainer(name, batch_size=4, seed=seed)
        wait_for_step(swarm, 2, *NAMES)
        *others, cleo, dora = (swarm.members[name] for name in NAMES)
        issuer.ban([tmp_path / "aux"], run, ["cleo"])
        issuer.admit(tmp_path / "dora", run, "trainer", "dora", lasts=SHORT_SECONDS)
        closed = [one.of(Listening)[0].peer_id for one in (cleo, dora)]

        def both_are_out() -> bool:
            late = [[event for event in committed(member) if event.at > expired][-2:] for member in others]
            return all(len(two) == 2 and not any(set(closed) & set(one.members) for one in two) for two in late)

        expired = time.time() + SHORT_SECONDS + CLOCK_LEEWAY
        assert swarm.wait(both_are_out, WAIT), [event.members for member in others for event in committed(member)]
        out_at = max(event.at for member in swarm.members.values() for event in committed(member))
        wait_for_step(swarm, max(map(last_step, others)) + 4, "anna", "ben")
        assert_agreed(others)
        rounds = [event for member in others for event in committed(member) if event.at > out_at]
        assert rounds
        for out, peer_id in zip((cleo, dora), closed, strict=True):
            assert not any(peer_id in event.members for event in rounds)
            assert not [event for event in (*committed(out), *out.of(Synchronised)) if event.at > out_at]

"""Members that attack what is averaged, or who averages, as real peers: the others train on, and say who it was."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from end_to_end.conftest import PACE, WAIT, assert_agreed, committed, last_step, tiny_run, wait_for_step

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Listening, Round, Step, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

LIES_FROM = 15  # steps

StartSwarm = Callable[[RunConfig], LocalSwarm]


def troubles(member: LocalPeer, *words: str) -> list[Trouble]:
    return [event for event in member.of(Trouble) if all(each in event.words for each in words)]


def mean_loss(member: LocalPeer, first: int, last: int) -> float:
    return statistics.fmean(e.loss for e in member.of(Step) if first <= e.epoch <= last and e.loss is not None)


@pytest.mark.promise(
    "A flipped gradient is clipped, its sender named, and the swarm's loss falls all the same",
    also="tests/swarm/test_centered_clip.py",
)
@pytest.mark.promise(
    "A lying reducer is proven by audits, left out by all, and the evidence kept", also="tests/swarm/test_audit.py"
)
def test_who_attacks_what_is_averaged_is_named_and_changes_nothing(start_swarm: StartSwarm) -> None:
    """dora sends her gradient flipped, a hundred times as large; later she reduces to the negative of the average."""
    patient = {"matchmaking_time": 5.0, "next_chunk_timeout": 10.0, "averaging_timeout": 60.0}
    run = tiny_run(schedule={"total_steps": 60, "peak_lr": 1e-2}, swarm={**patient, "target_batch_size": 64})
    swarm = start_swarm(run)
    attacks = {"sign flip x100": 2, "lying reducer": LIES_FROM}
    members = [
        swarm.start_trainer(
            name,
            batch_size=8,
            pace=2 * PACE,
            seed=seed,
            small_parts=True,
            client_mode=name == "cleo",  # audits reach it all the same
            attacks=attacks if name == "dora" else {},
        )
        for seed, name in enumerate(("anna", "ben", "cleo", "dora"))
    ]
    *honest, dora = members
    anna = honest[0]
    wait_for_step(swarm, LIES_FROM - 1, "anna", "ben", "cleo", "dora")
    named = dora.of(Listening)[0].peer_id
    assert troubles(anna, "dora", "clipped")
    assert troubles(dora, "this peer's gradient is unlike the others'"), "it hears so too"
    rounds = [event for event in committed(anna) if event.epoch < LIES_FROM]
    whole = [event for event in rounds if event.epoch > 3 and len(event.members) == 4 and event.received == 1.0]
    attacked = [event for event in whole if named in event.clipped]  # with samples of hers in it
    assert attacked and all(event.clipped[named] > 0.9 for event in attacked)
    assert all(share < 0.5 for event in attacked for peer, share in event.clipped.items() if peer != named)
    assert mean_loss(anna, LIES_FROM - 5, LIES_FROM - 1) < mean_loss(anna, 1, 5) - 0.05, "the honest ones learn"

    def proven() -> bool:
        return all(troubles(member, "dora", "made a wrong average") for member in honest)

    assert swarm.wait(proven, WAIT)
    step = max(last_step(member) for member in honest)
    wait_for_step(swarm, step + 3, "anna", "ben", "cleo")
    assert_agreed(honest)
    for member in honest:
        late = [event for event in committed(member) if event.epoch > step + 1]
        assert late and all(named not in event.members for event in late)
        (kept,) = member.home.rglob("*.accusation")
        assert kept.name.startswith(named)
    assert not any(troubles(member, name, "wrong average") for member in honest for name in ("anna", "ben", "cleo"))
    assert not any(troubles(member, "does no work") for member in members)


@pytest.mark.promise(
    "A leader that says that nobody else listens is refused by all and named", also="tests/swarm/test_joins.py"
)
def test_who_leads_and_says_that_nobody_else_listens_is_refused_and_named(start_swarm: StartSwarm) -> None:
    """Whoever leads could be the only reducer, and make every average what it says."""
    swarm = start_swarm(tiny_run(schedule={"total_steps": 200}))
    members = [
        swarm.start_trainer(name, batch_size=4, seed=seed, attacks={"false leader": 2} if name == "dora" else {})
        for seed, name in enumerate(("anna", "ben", "cleo", "dora"))
    ]
    *honest, dora = members
    wait_for_step(swarm, 2, "anna", "ben", "cleo", "dora")
    led = dora.of(Listening)[0].peer_id

    def named() -> bool:
        return all(troubles(member, "dora", "led a group") for member in honest)

    assert swarm.wait(named, WAIT)
    wait_for_step(swarm, max(map(last_step, honest)) + 2, "anna", "ben", "cleo")
    assert_agreed(honest)
    for member in honest:
        refused = {peer for event in member.of(Round) for peer, why in event.rejected.items() if "led a group" in why}
        assert refused == {led}

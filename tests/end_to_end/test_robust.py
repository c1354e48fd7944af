"""Members that attack what is averaged, as real peers: the others train on, and say who it was."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, tiny_run, wait_for_step

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Listening, Step, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

StartSwarm = Callable[[RunConfig], LocalSwarm]


def start(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch, attacks: dict[str, str]
) -> tuple[LocalSwarm, dict[str, LocalPeer]]:
    monkeypatch.setenv("TT_TEST_ATTACKS", json.dumps(attacks))
    swarm = start_swarm(
        tiny_run(
            schedule={"total_steps": 60},
            swarm={"matchmaking_time": 5.0, "next_chunk_timeout": 10.0, "averaging_timeout": 60.0},
        )
    )
    names = ("anna", "ben", "cleo", "dora")
    for seed, name in enumerate(names):
        client = {"client_mode": True} if name == "cleo" else {}  # audits reach it all the same
        swarm.start_trainer(name, module="end_to_end.hostile_peer", batch_size=4, seed=seed, **client)
    return swarm, {name: swarm.members[name] for name in names}


def troubles(member: LocalPeer, *words: str) -> list[Trouble]:
    return [event for event in member.of(Trouble) if all(each in event.words for each in words)]


def mean_loss(member: LocalPeer, first: int, last: int) -> float:
    return statistics.fmean(e.loss for e in member.of(Step) if first <= e.epoch <= last and e.loss is not None)


@pytest.mark.promise(
    "A flipped gradient is clipped, its sender named, and the swarm's loss falls all the same",
    also="tests/swarm/test_centered_clip.py",
)
def test_a_gradient_flipped_and_enlarged_is_clipped_and_its_sender_is_named(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, members = start(start_swarm, monkeypatch, {"dora": "flips"})
    anna, dora = members["anna"], members["dora"]
    assert swarm.wait(lambda: bool(troubles(anna, "dora", "clipped")), WAIT)
    wait_for_step(swarm, max(20, last_step(anna) + 1), *members)
    assert_agreed(list(members.values()))
    attacked = [event for event in committed(anna) if event.epoch > 3 and len(event.members) == 4]
    named = dora.of(Listening)[0].peer_id
    assert attacked and all(event.clipped[named] > 0.9 for event in attacked)
    assert all(share < 0.5 for event in attacked for peer, share in event.clipped.items() if peer != named)
    assert mean_loss(anna, 16, 20) < mean_loss(anna, 1, 5) - 0.05, "the honest ones learn"
    assert troubles(dora, "this peer's gradient is unlike the others'"), "it hears so too"


@pytest.mark.promise(
    "A lying reducer is proven by audits, left out by all, and the evidence kept", also="tests/swarm/test_audit.py"
)
def test_a_lying_reducer_is_proven_and_left_out(start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, members = start(start_swarm, monkeypatch, {"dora": "lies"})
    honest = [members[name] for name in ("anna", "ben", "cleo")]

    def proven() -> bool:
        return all(troubles(member, "dora", "made a wrong average") for member in honest)

    assert swarm.wait(proven, WAIT)
    liar = members["dora"].of(Listening)[0].peer_id
    step = max(last_step(member) for member in honest)
    wait_for_step(swarm, step + 3, "anna", "ben", "cleo")
    assert_agreed(honest)
    for member in honest:
        late = [event for event in committed(member) if event.epoch > step + 1]
        assert late and all(liar not in event.members for event in late)
        (kept,) = member.home.rglob("*.accusation")
        assert kept.name.startswith(liar)
    assert not any(troubles(member, name, "wrong average") for member in honest for name in ("anna", "ben", "cleo"))

"""Rounds in which something goes wrong: whatever it is, nobody steps on anything else than the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, tiny_run, wait_for_step

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Phase, Round, Step, Synchronised, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

StartSwarm = Callable[[RunConfig], LocalSwarm]
FAULTY = "end_to_end.faulty_peer"


def start(
    start_swarm: StartSwarm,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, dict[str, str]],
    *names: str,
    patience: float = 5.0,
) -> tuple[LocalSwarm, dict[str, LocalPeer]]:
    monkeypatch.setenv("TT_TEST_FAULTS", json.dumps(faults))
    swarm = start_swarm(
        tiny_run(swarm={"matchmaking_time": 5.0, "next_chunk_timeout": patience, "averaging_timeout": 10 * patience})
    )
    for seed, name in enumerate(names):
        swarm.start_trainer(name, module=FAULTY, batch_size=4, seed=seed)
    return swarm, {name: swarm.members[name] for name in names}


def assert_no_step_is_lost(member: LocalPeer) -> None:
    """Each step was made after the one before it, or taken over."""
    made = [event.epoch for event in member.events if isinstance(event, (Step, Synchronised))]
    taken = {event.epoch for event in member.of(Synchronised)}
    for before, after in zip(made, made[1:], strict=False):
        assert after == before + 1 or after in taken, made


@pytest.mark.promise(
    "A peer that dies before, amid, after sending or while sending takes no round's agreement with it",
    also="tests/swarm/test_allreduce.py",
)
def test_peers_that_die_at_every_moment_of_a_round_take_nobody_with_them(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {
        "ben": {"3": "dies before"},
        "cleo": {"4": "dies amid"},
        "dora": {"5": "dies after"},
        "emil": {"6": "dies sending"},
    }
    swarm, members = start(start_swarm, monkeypatch, faults, "anna", "ben", "cleo", "dora", "emil", "fred")
    for name in faults:
        assert swarm.wait(lambda name=name: not members[name].running, WAIT), f"{name} should have died"
    wait_for_step(swarm, max(8, last_step(members["anna"]) + 2), "anna", "fred")
    assert_agreed(list(members.values()))
    for name in ("anna", "fred"):
        assert_no_step_is_lost(members[name])
        assert {event.received for event in committed(members[name])} <= {1.0} or committed(members[name])


@pytest.mark.promise("A lost commit message changes nobody's state", also="tests/swarm/test_allreduce.py")
@pytest.mark.promise(
    "Who was sent other bytes than the rest repairs its average from theirs", also="tests/swarm/test_allreduce.py"
)
def test_lost_words_and_unlike_averages_change_nothing(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {
        "anna": {"4": "unlike averages"},
        "ben": {"3": "commit lost", "6": "unlike averages"},
        "cleo": {"5": "commit lost"},
    }
    swarm, members = start(start_swarm, monkeypatch, faults, "anna", "ben", "cleo")
    assert swarm.wait(lambda: any(event.mended for m in members.values() for event in committed(m)), WAIT)
    wait_for_step(swarm, max(8, last_step(members["anna"]) + 3), *members)
    assert_agreed([*members.values(), swarm.members["aux"]])
    for member in members.values():
        assert_no_step_is_lost(member)
    rounds = [event for member in members.values() for event in committed(member)]
    assert any(event.mended and event.differing for event in rounds), "who was sent other bytes took the others'"


@pytest.mark.promise(
    "Two members that hold unlike averages abort and repeat the round", also="tests/swarm/test_allreduce.py"
)
def test_two_peers_that_disagree_repeat_the_round(start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, members = start(start_swarm, monkeypatch, {"ben": {"3": "unlike averages"}}, "anna", "ben")
    failed: list[Round] = []

    def disagreed() -> bool:
        failed[:] = [event for member in members.values() for event in member.of(Round) if event.outcome == "failed"]
        return any("unlike bytes" in event.words for event in failed)

    assert swarm.wait(disagreed, WAIT)
    wait_for_step(swarm, max(event.epoch for event in failed) + 3, *members)
    assert_agreed(list(members.values()))


@pytest.mark.promise(
    "A flipped bit in the state is found by its digest, and that chunk taken from the others",
    also="tests/swarm/test_handover.py",
)
@pytest.mark.promise(
    "A state that is not finite is found before a step, and the backup taken", also="tests/peer/test_shared.py"
)
def test_damaged_memory_is_mended_from_the_others(start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"anna": {"4": "bit flipped"}, "ben": {"6": "memory damaged"}}
    swarm, members = start(start_swarm, monkeypatch, faults, "anna", "ben", "cleo")
    anna, ben, cleo = members.values()

    def taken() -> list[Synchronised]:
        """What anna took over after her first step: before it, she may have taken the whole state."""
        first = next((number for number, event in enumerate(anna.events) if isinstance(event, Step)), len(anna.events))
        return [event for event in anna.events[first:] if isinstance(event, Synchronised) and event.chunks]

    def damaged() -> list[Trouble]:
        return [event for event in ben.of(Trouble) if event.what == "state"]

    def story() -> str:
        told = [event for member in members.values() for event in (member.name, *member.events)]
        return "\n".join(one if isinstance(one, str) else one.to_json()[:300] for one in told)

    assert swarm.wait(lambda: bool(taken() and damaged()), WAIT), story()
    wait_for_step(swarm, last_step(cleo) + 3, *members)
    own = {event.epoch for event in anna.of(Step)}
    for event in taken():  # at the same step one chunk differs; when the others have stepped meanwhile, all may
        assert event.chunks == len(event.names) or event.epoch not in own, "what was mended is named"
    (trouble,) = damaged()
    assert "the memory was damaged before step" in trouble.words and trouble.remedy.startswith("going on from step")
    assert ben.running and anna.running
    assert {m.of(Step)[-1].digest for m in members.values() if m.of(Step)[-1].epoch == last_step(cleo)} == {
        cleo.of(Step)[-1].digest
    }


@pytest.mark.promise("Who joins amid a round takes the state before it, and steps with the others after it")
def test_a_peer_that_joins_in_the_middle_of_a_round(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    swarm, members = start(start_swarm, monkeypatch, {"ben": {"3": f"waits for {gate}"}}, "anna", "ben", patience=WAIT)
    anna = members["anna"]
    assert swarm.wait(lambda: last_step(anna) >= 2 and anna.of(Phase)[-1].phase == "averaging", WAIT)
    late = swarm.start_trainer("cleo", module=FAULTY, batch_size=4, seed=2)
    assert swarm.wait(lambda: any(event.phase == "training" for event in late.of(Phase)), WAIT)
    step = last_step(anna)
    assert late.of(Synchronised)[-1].epoch == step, "the round has not ended"
    gate.touch()
    wait_for_step(swarm, step + 3, "anna", "ben", "cleo")
    assert_agreed([*members.values(), late])
    assert_no_step_is_lost(late)

"""Rounds in which something goes wrong: whatever it is, nobody steps on anything else than the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import (
    WAIT,
    assert_agreed,
    committed,
    digests,
    last_step,
    start_together,
    tiny_run,
    wait_for_step,
)
from testbed.faults import Faults

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Log, Phase, Progress, Round, Saved, Step, Synchronised, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

StartSwarm = Callable[[RunConfig], LocalSwarm]


def start(
    start_swarm: StartSwarm, faults: Faults, *names: str, patience: float = 5.0
) -> tuple[LocalSwarm, dict[str, LocalPeer]]:
    times = {"matchmaking_time": 3.0, "next_chunk_timeout": patience, "averaging_timeout": 10 * patience}
    swarm = start_swarm(tiny_run(swarm=times))
    options = {"small_parts": True, "batch_size": 4}
    each = {name: {"faults": faults.of(name), "seed": seed, **options} for seed, name in enumerate(names)}
    return swarm, dict(zip(names, start_together(swarm, each), strict=True))


def assert_no_step_is_lost(member: LocalPeer, until: int = 1000) -> None:
    """Each step up to this one was made after the one before it, or taken over."""
    events = (event for event in member.events if isinstance(event, (Step, Synchronised)))
    made = [event.epoch for event in events if event.epoch <= until]
    taken = {event.epoch for event in member.of(Synchronised)}
    for before, after in zip(made, made[1:], strict=False):
        assert after == before + 1 or after in taken, made


@pytest.mark.promise(
    "A peer that dies amid a round, or while sending, takes no round's agreement with it",
    also="tests/simulation/test_schedules.py",
)
def test_peers_that_die_amid_a_round_take_nobody_with_them(start_swarm: StartSwarm) -> None:
    """Two of the moments at which a whole peer may go; those of every message are the simulator's `reducer`."""
    faults = Faults().fail_at("ben", 3, "die sending").fail_at("cleo", 4, "die amid")
    swarm, members = start(start_swarm, faults, "anna", "ben", "cleo", "dora", patience=4.0)
    for name in ("ben", "cleo"):
        died = swarm.wait(lambda name=name: not members[name].running, WAIT)
        assert died, (name, {m.name: (last_step(m), m.of(Phase)[-5:]) for m in members.values()})
    wait_for_step(swarm, last_step(members["anna"]) + 2, "anna", "dora")
    assert_agreed(list(members.values()))
    for name in ("anna", "dora"):
        assert_no_step_is_lost(members[name])
        assert committed(members[name])


@pytest.mark.promise("A lost commit message changes nobody's state", also="tests/swarm/test_allreduce.py")
@pytest.mark.promise(
    "What members precommitted in a round that came to nothing is their next step, and no gradient is sent again",
    also="tests/swarm/test_locks.py",
)
@pytest.mark.promise(
    "Who was sent other bytes than the rest repairs its average from theirs", also="tests/swarm/test_allreduce.py"
)
@pytest.mark.promise(
    "Gradients that are not finite reach nobody's parameters, whoever sees them first",
    also="tests/swarm/test_allreduce.py",
)
@pytest.mark.promise(
    "A flipped bit in the state is found by its digest, and that chunk taken from the others",
    also="tests/swarm/test_handover.py",
)
@pytest.mark.promise(
    "A state that is not finite is found before a step, and the backup taken", also="tests/peer/test_shared.py"
)
def test_what_goes_wrong_in_rounds_and_in_memory_changes_nobodys_state(start_swarm: StartSwarm) -> None:
    """One fault after the other, in one swarm. The last may keep cleo away, and of two alone either may be right."""
    faults = Faults().fail_at("cleo", 2, "not finite").fail_at("ben", 3, "drop precommit")
    faults.fail_at("anna", 4, "unlike averages").fail_at("cleo", 5, "drop commit").fail_at("ben", 6, "unlike averages")
    faults.fail_at("cleo", 3, "drop precommit")  # as ben: nobody hears anybody
    faults.fail_at("anna", 8, "flip a bit").fail_at("ben", 10, "damage memory").fail_at("cleo", 14, "NaN part")
    for step in range(18, 60, 4):  # for who was in rounds of two until then: of two nobody is in the right
        faults.fail_at("anna", step, "unlike averages").fail_at("ben", step + 2, "unlike averages")
        faults.fail_at("ben", step + 3, "drop precommit").fail_at("cleo", step + 3, "drop precommit")
    swarm, members = start(start_swarm, faults, "anna", "ben", "cleo")
    anna, ben, cleo = everybody = list(members.values())

    def taken() -> list[Synchronised]:
        """What anna took over after her first step: before it, she may have taken the whole state."""
        first = next((number for number, event in enumerate(anna.events) if isinstance(event, Step)), len(anna.events))
        return [event for event in anna.events[first:] if isinstance(event, Synchronised) and event.chunks]

    def damaged() -> list[Trouble]:
        return [event for event in ben.of(Trouble) if event.what == "state"]

    def refused() -> bool:
        """Whether the others saw that cleo's gradient is not finite."""
        rejected = [why for member in (anna, ben) for event in member.of(Round) for why in event.rejected.values()]
        return any("not finite" in why for why in rejected)

    def repaired() -> bool:
        """Whether who was sent other bytes took those of the others."""
        rounds = [event for member in everybody for event in committed(member)]
        return any(event.mended and event.differing for event in rounds)

    def repeated() -> bool:
        """Whether all stepped with what they had voted for in a round that came to nothing."""
        return all(any("voted before" in event.words for event in committed(member)) for member in everybody)

    def story() -> str:
        told = [event for member in everybody for event in (member.name, *member.events)]
        return "\n".join(one if isinstance(one, str) else one.to_json()[:300] for one in told)

    assert swarm.wait(lambda: bool(taken() and damaged() and refused() and repaired() and repeated()), WAIT), story()
    wait_for_step(swarm, last_step(cleo) + 3, *members)
    assert any(event.rejected_micro_batches for event in cleo.of(Progress)), "a peer's own"
    assert any("not finite" in event.message for event in cleo.of(Log))

    own = {event.epoch for event in anna.of(Step)}
    for event in taken():  # at the same step one chunk differs; when the others have stepped meanwhile, all may
        assert event.chunks == len(event.names) or event.epoch not in own, "what was mended is named"
    (trouble,) = damaged()
    assert "the memory was damaged before step" in trouble.words and trouble.remedy.startswith("going on from step")
    assert all(member.running for member in everybody)

    mended_at = max(event.epoch for event in taken())  # until then anna's state was another one
    unlike = {step for step, found in digests([*everybody, swarm.members["aux"]]).items() if len(found) > 1}
    assert all(8 <= step <= mended_at for step in unlike), story()
    for member in everybody:
        assert_no_step_is_lost(member, until=7)
    swarm.leave(*members)
    states = [load(Path(member.of(Saved)[-1].path)) for member in everybody]
    assert all(bool(torch.isfinite(tensor).all()) for state in states for tensor in state.parameters.values())


@pytest.mark.promise(
    "Two members that hold unlike averages abort and repeat the round", also="tests/swarm/test_allreduce.py"
)
@pytest.mark.promise("Who joins amid a round takes the state before it, and steps with the others after it")
def test_two_peers_repeat_a_round_and_a_third_joins_amid_one(start_swarm: StartSwarm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    faults = Faults().fail_at("ben", 3, "unlike averages").fail_at("ben", 5, f"wait for {gate}")
    faults.fail_at("ben", 3, "unlike averages")  # a round of a busy machine may fail for something else
    swarm, members = start(start_swarm, faults, "anna", "ben", patience=30.0)
    anna = members["anna"]

    def disagreed() -> bool:
        failed = [event for member in members.values() for event in member.of(Round) if event.outcome == "failed"]
        return any("unlike bytes" in event.words for event in failed)

    assert swarm.wait(disagreed, WAIT)
    assert swarm.wait(gate.with_suffix(".awaited").exists, WAIT)
    late = swarm.start_trainer("cleo", small_parts=True, batch_size=4, seed=2)
    assert swarm.wait(lambda: any(event.phase == "training" for event in late.of(Phase)), WAIT)
    step = last_step(anna)
    assert late.of(Synchronised)[-1].epoch == step, "the round has not ended"
    gate.touch()
    wait_for_step(swarm, step + 3, "anna", "ben", "cleo")
    assert_agreed([*members.values(), late])
    assert_no_step_is_lost(late)

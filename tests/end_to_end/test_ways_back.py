"""The organiser pauses a run of real peers, and takes it back to a checkpoint: one signed notice, and all follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from end_to_end.conftest import WAIT, assert_agreed, last_step, tiny_run, wait_for_step

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.identity.passes import Notice, RollBack, public_text, sign
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Event, Phase, Saved, Snapshot, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

KEY = Ed25519PrivateKey.generate()
NOBODY: frozenset[str] = frozenset()


def since(member: LocalPeer, seen: int, kind: type[Event]) -> list[Event]:
    return [event for event in member.events[seen:] if isinstance(event, kind)]


@pytest.mark.promise(
    "The organiser pauses a run with one signed notice, and all trainers say why", also="tests/swarm/test_steering.py"
)
@pytest.mark.promise(
    "The organiser rolls a run back to a checkpoint, and late joiners follow", also="tests/swarm/test_steering.py"
)
def test_the_organiser_pauses_a_run_and_takes_it_back(start_swarm: Callable[[RunConfig], LocalSwarm]) -> None:
    membership = {"authority": "http://127.0.0.1:1", "authority_key": public_text(KEY)}
    run = tiny_run(membership=membership)
    swarm = start_swarm(run)
    aux = swarm.members["aux"]
    trainers = [swarm.start_trainer(name, batch_size=8, seed=seed) for seed, name in enumerate(("anna", "ben"))]
    assert swarm.wait(lambda: len(aux.of(Saved)) >= 2, WAIT), aux.worker.log.read_text()
    checkpoints = Path(aux.of(Saved)[0].path).parent

    def order(number: int, paused: str = "", rollback: RollBack | None = None) -> None:
        """Only the auxiliary peer hears it from the authority; the others hear it from the swarm."""
        notice = Notice(run.identity, number, time.time(), NOBODY, NOBODY, paused, rollback)
        (checkpoints.parent / "notice").write_text(sign(notice, KEY) + "\n")

    # Paused, all wait with the organiser's reason, and no step is made.
    order(1, paused="new data are coming")
    told = "the organiser paused the run: new data are coming"

    def wait_paused() -> bool:
        return all(member.of(Phase)[-1].reason == told for member in trainers)

    assert swarm.wait(wait_paused, WAIT), [member.of(Phase)[-1] for member in trainers]
    assert swarm.wait(lambda: aux.of(Snapshot)[-1].swarm["paused"] == "new data are coming", WAIT)
    paused_at = max(map(last_step, trainers))

    # Back to a checkpoint, and on from there.
    then = load(sorted(checkpoints.glob("step-*.safetensors"))[0])
    assert then.step < paused_at
    seen = {member.name: len(member.events) for member in (*trainers, aux)}
    order(2, rollback=RollBack(then.step, then.digest(), "", order=1))

    def story() -> str:
        told = [event for member in (*trainers, aux) for event in member.events[seen[member.name] :]]
        return "\n".join(event.to_json()[:300] for event in told if event.kind not in ("progress", "snapshot"))

    def went_back(member: LocalPeer) -> bool:
        back = since(member, seen[member.name], Synchronised)
        return any(isinstance(event, Synchronised) and event.epoch <= then.step + 1 for event in back)

    assert swarm.wait(lambda: all(map(went_back, trainers)), WAIT), story()
    first = {member.name: since(member, seen[member.name], Synchronised)[0] for member in trainers}
    assert then.digest() in {event.digest for event in first.values() if isinstance(event, Synchronised)}

    def turn(member: LocalPeer) -> int:
        """The event with which it goes back: before that, a round may have ended that began before the pause."""
        told = [isinstance(event, Phase) and "takes the run back" in event.reason for event in member.events]
        return told.index(True)

    def on_again(member: LocalPeer) -> bool:
        steps = [event.epoch for event in since(member, turn(member), Step) if isinstance(event, Step)]
        return bool(steps) and steps[0] <= paused_at and steps[-1] >= then.step + 2

    assert swarm.wait(lambda: all(map(on_again, trainers)), WAIT), story()

    # Who comes later takes over what the run is now, and all agree.
    late = swarm.start_trainer("cleo", batch_size=8, seed=2)
    wait_for_step(swarm, then.step + 3, "cleo")
    for member in trainers:
        del member.events[: turn(member)]
    wait_for_step(swarm, last_step(late) + 1, "anna", "ben", "cleo")
    assert_agreed([*trainers, late])

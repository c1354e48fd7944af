"""Real peers in real processes: they train, agree, come late, leave, die and return."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import (
    WAIT,
    assert_agreed,
    committed,
    digests,
    last_step,
    local_swarm,
    start_together,
    tiny_run,
    wait_for_step,
)
from testbed.process_watch import ProcessWatch

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig
from tt_cli.run.initial_peers import peers_met
from tt_cli.supervisor.events import (
    Choice,
    Contribution,
    Finished,
    Listening,
    Phase,
    Progress,
    Round,
    Saved,
    Step,
    Synchronised,
)
from tt_cli.supervisor.local_swarm import LocalSwarm
from tt_cli.supervisor.processes import family_of

StartSwarm = Callable[[RunConfig], LocalSwarm]


@pytest.mark.promise(
    "Trainers and aux peer hold the same parameters to the last bit", also="tests/swarm/test_allreduce.py"
)
@pytest.mark.promise("At the run's last step trainers end by themselves with exit code 0")
def test_three_peers_train_to_the_end_and_agree_to_the_last_bit(start_swarm: StartSwarm) -> None:
    last, names = 8, ("anna", "ben", "cleo")
    swarm = start_swarm(tiny_run(schedule={"total_steps": last}))
    trainers = start_together(swarm, {name: {"batch_size": 4, "seed": seed} for seed, name in enumerate(names)})
    wait_for_step(swarm, last, *names)
    aux = swarm.members["aux"]
    assert swarm.wait(lambda: any(event.epoch == last for event in aux.of(Saved)), WAIT)
    assert swarm.wait(lambda: all(trainer.of(Finished) for trainer in trainers), WAIT)
    assert [trainer.worker.wait(WAIT) for trainer in trainers] == [0, 0, 0]

    assert_agreed(trainers)
    together = [event for trainer in trainers for event in committed(trainer)]
    assert any(len(event.members) == 3 and event.received == 1.0 for event in together)
    states = [load(Path(member.of(Saved)[-1].path)) for member in (*trainers, aux)]
    assert {state.step for state in states} == {last}
    for state in states[1:]:
        for name, tensor in states[0].parameters.items():
            assert torch.equal(tensor, state.parameters[name]), name
    assert all(math.isfinite(event.loss) for event in trainers[0].of(Step) if event.loss is not None)


@pytest.mark.promise(
    "A trainer in client mode alone, and the aux peer, say what they wait for", also="tests/auxiliary/test_standby.py"
)
@pytest.mark.promise(
    "A trainer in client mode trains with one that accepts connections", also="tests/swarm/test_allreduce.py"
)
@pytest.mark.promise("Without delayed updates trainers agree too")
def test_a_peer_in_client_mode_waits_for_one_that_accepts_connections(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run(optimizer={"delayed": False}))
    client, aux = swarm.start_trainer("cleo", batch_size=4, seed=0, client_mode=True), swarm.members["aux"]
    assert swarm.wait(lambda: any(event.phase == "waiting" for event in client.of(Phase)), WAIT)
    assert not client.of(Step)
    assert swarm.wait(lambda: any("the assistant helps (--assist)" in event.reason for event in aux.of(Phase)), WAIT)
    anna = swarm.start_trainer("anna", batch_size=4, seed=1)
    whole = swarm.wait(lambda: [event.received for event in committed(client)].count(1.0) >= 2, WAIT)
    assert whole, client.of(Round)
    wait_for_step(swarm, committed(client)[-1].epoch, "anna", "cleo")
    assert_agreed([anna, client, aux])
    assert swarm.wait(lambda: aux.of(Phase)[-1].phase == "serving", WAIT)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """An aux peer, anna and ben, who train while others come and go; the last test ends it."""
    with local_swarm(tiny_run(), tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.start_aux()
        for seed, name in enumerate(("anna", "ben")):
            swarm.start_trainer(name, batch_size=4, seed=seed)
        wait_for_step(swarm, 2, "anna", "ben")
        yield swarm


@pytest.mark.promise("A late joiner takes the state over and contributes", also="tests/swarm/test_handover.py")
@pytest.mark.promise("A killed peer leaves no process, and the others go on")
@pytest.mark.promise("A killed peer returns with its home, catches up and contributes")
def test_a_peer_comes_late_is_killed_and_returns(swarm: LocalSwarm) -> None:
    anna, begun = swarm.members["anna"], last_step(swarm.members["anna"])
    late = swarm.start_trainer("cleo", batch_size=4, seed=2)
    assert swarm.wait(lambda: bool(late.of(Contribution)), WAIT)
    taken = late.of(Synchronised)[0]
    assert taken.epoch >= begun and taken.source not in ("", "seed")
    step = late.of(Contribution)[0].epoch
    wait_for_step(swarm, step, "anna", "ben")
    assert len(digests(list(swarm.members.values()))[step]) == 1

    family = family_of(late.worker.pid)
    assert len(family) >= 4, "the peer, its DHT, its daemon and its averager"
    watch = ProcessWatch(family)
    os.kill(late.worker.pid, signal.SIGKILL)
    assert watch.left_after(WAIT) == set()
    reached = last_step(anna)
    wait_for_step(swarm, reached + 2, "anna", "ben")

    returned = swarm.start_trainer("cleo", batch_size=4, seed=3)
    assert swarm.wait(lambda: bool(returned.of(Contribution)), WAIT)
    assert returned.of(Synchronised)[0].epoch > reached
    wait_for_step(swarm, returned.of(Contribution)[0].epoch, "anna", "ben")
    assert_agreed([*swarm.members.values(), late])
    swarm.leave("cleo")


@pytest.mark.promise("Trainers of runs with unlike settings never average together", also="tests/run/test_config.py")
def test_runs_with_unlike_settings_never_average_together(swarm: LocalSwarm) -> None:
    other = tiny_run(schedule={"peak_lr": 4e-3})
    assert other.identity != tiny_run().identity
    dora = swarm.start_trainer("dora", batch_size=4, seed=1, run=other.to_toml())
    wait_for_step(swarm, 3, "dora")
    assert {event.outcome for event in dora.of(Round)} == {"alone"}
    assert max(event.peers for event in dora.of(Progress)) == 1
    trained = [swarm.members["anna"], swarm.members["ben"]]
    assert not any(dora.of(Listening)[0].peer_id in event.members for one in trained for event in committed(one))
    assert not set.union(*digests(trained).values()) & set.union(*digests([dora]).values())
    swarm.leave("dora")


@pytest.mark.promise("Who leaves cleanly writes a backup and costs the others nothing")
@pytest.mark.promise(
    "A swarm that ended goes on from the newest backup among its peers", also="tests/peer/test_backup.py"
)
def test_peers_leave_until_nobody_is_there_and_go_on_from_the_newest_backup(swarm: LocalSwarm) -> None:
    anna = swarm.members["anna"]
    swarm.leave("anna")
    assert anna.worker.exit_code == 0 and anna.of(Finished)
    backup = load(Path(anna.of(Saved)[-1].path))
    held = {(event.epoch, event.digest) for event in anna.events if isinstance(event, (Step, Synchronised))}
    assert (backup.step, backup.digest()) in held and backup.step >= anna.of(Step)[-1].epoch, anna.events[-12:]
    older = anna.of(Saved)[-1].epoch
    wait_for_step(swarm, older + 3, "ben")
    assert_agreed([anna, swarm.members["ben"], swarm.members["aux"]])
    swarm.leave("ben")
    newer = swarm.members["ben"].of(Saved)[-1].epoch
    swarm.members["aux"].worker.kill()
    swarm.members["aux"].worker.wait(WAIT)

    swarm.addresses = []
    swarm.start_aux("another-aux")  # on another machine: it has no state
    ben = swarm.start_trainer("ben", batch_size=4, seed=1)
    assert swarm.wait(lambda: bool(ben.of(Step)), WAIT)
    assert ben.of(Step)[0].epoch == newer + 1
    anna = swarm.start_trainer("anna", batch_size=4, seed=0)
    wait_for_step(swarm, newer + 4, "anna", "ben")
    assert anna.of(Synchronised)[0].epoch > newer > older
    assert_agreed([anna, ben])


@pytest.mark.promise(
    "A killed peer comes back through members that it met before, while no initial peer answers",
    also="tests/swarm/test_contact.py",
)
def test_a_peer_comes_back_while_no_initial_peer_answers(swarm: LocalSwarm) -> None:
    anna, ben = swarm.members["anna"], swarm.members["ben"]
    folder, address = anna.home / "runs" / tiny_run().identity, ben.of(Listening)[0].addresses[0]
    assert swarm.wait(lambda: address in peers_met(folder), WAIT)
    for member in (swarm.members["another-aux"], anna):
        member.worker.kill()
        member.worker.wait(WAIT)
    returned = swarm.start_trainer("anna", batch_size=4, seed=2)
    assert swarm.wait(lambda: bool(returned.of(Contribution)), WAIT), returned.events[-12:]
    assert [event.what for event in returned.of(Choice)].count("members to join through") == 1
    assert_agreed([returned, ben])

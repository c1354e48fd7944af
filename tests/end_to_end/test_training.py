"""Real peers in real processes: they train, agree, come late, leave, die and return."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from end_to_end.conftest import WAIT, assert_agreed, committed, digests, last_step, tiny_run, wait_for_step

from scripts.lab.process_watch import ProcessWatch
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import (
    Contribution,
    Finished,
    Log,
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
def test_three_peers_train_and_agree_to_the_last_bit(start_swarm: StartSwarm) -> None:
    run = tiny_run(schedule={"total_steps": 10})
    swarm = start_swarm(run)
    names = ("anna", "ben", "cleo")
    trainers = [swarm.start_trainer(name, batch_size=4, seed=seed) for seed, name in enumerate(names)]
    wait_for_step(swarm, 10, *names)
    aux = swarm.members["aux"]
    assert swarm.wait(lambda: any(event.epoch == 10 for event in aux.of(Saved)), WAIT)
    assert swarm.wait(lambda: all(trainer.of(Finished) for trainer in trainers), WAIT)
    assert [trainer.worker.wait(WAIT) for trainer in trainers] == [0, 0, 0]

    assert_agreed(trainers)
    together = [event for trainer in trainers for event in committed(trainer)]
    assert {len(event.members) for event in together} >= {3}
    assert median(event.received for event in together) == 1.0  # a busy machine makes a straggler of a member at times
    states = [load(Path(member.of(Saved)[-1].path)) for member in (*trainers, aux)]
    assert {state.step for state in states} == {10}
    for state in states[1:]:
        for name, tensor in states[0].parameters.items():
            assert torch.equal(tensor, state.parameters[name]), name
    assert all(math.isfinite(event.loss) for event in trainers[0].of(Step) if event.loss is not None)


@pytest.mark.promise("A late joiner takes the state over and contributes", also="tests/swarm/test_handover.py")
def test_a_late_joiner_takes_the_state_over_and_contributes(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    swarm.start_trainer("anna", batch_size=4, seed=0)
    swarm.start_trainer("ben", batch_size=4, seed=1)
    wait_for_step(swarm, 3, "anna", "ben")
    late = swarm.start_trainer("cleo", batch_size=4, seed=2)
    assert swarm.wait(lambda: bool(late.of(Contribution)), WAIT)
    taken = late.of(Synchronised)[0]
    assert taken.epoch >= 3
    assert taken.source not in ("", "seed")
    step = late.of(Contribution)[0].epoch
    wait_for_step(swarm, step, "anna", "ben", "cleo")
    assert len(digests(list(swarm.members.values()))[step]) == 1


@pytest.mark.promise("A killed peer leaves no process, and the others go on")
@pytest.mark.promise("A killed peer returns with its home, catches up and contributes")
def test_a_killed_peer_leaves_no_process_and_the_others_go_on(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    for seed, name in enumerate(("anna", "ben", "cleo")):
        swarm.start_trainer(name, batch_size=4, seed=seed)
    wait_for_step(swarm, 2, "anna", "ben", "cleo")
    victim = swarm.members["cleo"].worker
    family = family_of(victim.pid)
    assert len(family) >= 4, "the peer, its DHT, its daemon and its averager"
    watch = ProcessWatch(family)
    os.kill(victim.pid, signal.SIGKILL)
    assert watch.left_after(WAIT) == set()

    reached = last_step(swarm.members["anna"])
    wait_for_step(swarm, reached + 3, "anna", "ben")
    returned = swarm.start_trainer("cleo", batch_size=4, seed=3)
    assert swarm.wait(lambda: bool(returned.of(Contribution)), WAIT)
    assert returned.of(Synchronised)[0].epoch > reached
    step = returned.of(Contribution)[0].epoch
    wait_for_step(swarm, step, "anna", "ben", "cleo")
    assert_agreed(list(swarm.members.values()))


@pytest.mark.promise("Who leaves cleanly writes a backup and costs the others nothing")
def test_a_clean_leave_costs_the_others_nothing(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    for seed, name in enumerate(("anna", "ben", "cleo")):
        swarm.start_trainer(name, batch_size=4, seed=seed)
    wait_for_step(swarm, 2, "anna", "ben", "cleo")
    leaving = swarm.members["cleo"]
    swarm.leave("cleo")
    assert leaving.worker.exit_code == 0
    assert leaving.of(Finished)
    backup = load(Path(leaving.of(Saved)[-1].path))
    assert backup.digest() == leaving.of(Step)[-1].digest
    wait_for_step(swarm, last_step(swarm.members["anna"]) + 3, "anna", "ben")
    assert_agreed(list(swarm.members.values()))


@pytest.mark.promise(
    "A trainer in client mode trains with one that accepts connections", also="tests/swarm/test_allreduce.py"
)
def test_a_peer_in_client_mode_trains_with_the_others(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    swarm.start_trainer("anna", batch_size=4, seed=0)
    wait_for_step(swarm, 1, "anna")
    client = swarm.start_trainer("cleo", batch_size=4, seed=1, client_mode=True)
    assert swarm.wait(lambda: len(committed(client)) >= 3, WAIT)
    assert {event.received for event in committed(client)} == {1.0}
    step = committed(client)[-1].epoch
    wait_for_step(swarm, step, "anna", "cleo")
    assert len(digests(list(swarm.members.values()))[step]) == 1


@pytest.mark.promise(
    "A trainer in client mode alone, and the aux peer, say what they wait for", also="tests/auxiliary/test_standby.py"
)
def test_two_peers_in_client_mode_alone_say_what_they_wait_for(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    client = swarm.start_trainer("cleo", batch_size=4, seed=0, client_mode=True)
    assert swarm.wait(lambda: any(event.phase == "waiting" for event in client.of(Phase)), WAIT)
    assert not client.of(Step)
    aux = swarm.members["aux"]
    assert swarm.wait(lambda: any("the assistant helps (--assist)" in event.reason for event in aux.of(Phase)), WAIT)
    swarm.start_trainer("anna", batch_size=4, seed=1)
    wait_for_step(swarm, 2, "anna", "cleo")
    assert swarm.wait(lambda: aux.of(Phase)[-1].phase == "serving", WAIT)


@pytest.mark.promise(
    "Gradients that are not finite reach nobody's parameters, whoever sees them first",
    also="tests/swarm/test_allreduce.py",
)
@pytest.mark.parametrize("poison", ["local", "remote"])
def test_nan_gradients_of_one_peer_change_nobodys_parameters(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    monkeypatch.setenv("TT_TEST_POISON", poison)
    swarm = start_swarm(tiny_run())
    swarm.start_trainer("anna", batch_size=4, seed=0)
    swarm.start_trainer("ben", batch_size=4, seed=1)
    bad = swarm.start_trainer("mallory", module="end_to_end.poisoned_peer", batch_size=4, seed=2)
    wait_for_step(swarm, 7, "anna", "ben", "mallory")
    honest = [swarm.members["anna"], swarm.members["ben"]]
    if poison == "local":
        assert swarm.wait(lambda: any(event.rejected_micro_batches for event in bad.of(Progress)), WAIT)
        assert any("not finite" in event.message for event in bad.of(Log))
    else:
        peer_id = committed(bad)[0].members if committed(bad) else []
        refused = {name: why for member in honest for event in member.of(Round) for name, why in event.rejected.items()}
        assert any("not finite" in why for why in refused.values()), (peer_id, refused)
    assert_agreed([*honest, bad])
    swarm.leave("anna", "ben")
    for member in honest:
        state = load(Path(member.of(Saved)[-1].path))
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.parameters.values())


@pytest.mark.promise("Trainers of runs with unlike settings never average together", also="tests/run/test_config.py")
def test_runs_with_unlike_settings_never_average_together(start_swarm: StartSwarm) -> None:
    run, other = tiny_run(), tiny_run(schedule={"peak_lr": 4e-3})
    assert run.identity != other.identity
    swarm = start_swarm(run)
    swarm.start_trainer("anna", batch_size=4, seed=0)
    swarm.start_trainer("ben", batch_size=4, seed=1, run=other.to_toml())
    wait_for_step(swarm, 3, "anna", "ben")
    for name in ("anna", "ben"):
        assert {event.outcome for event in swarm.members[name].of(Round)} == {"alone"}
        assert max(event.peers for event in swarm.members[name].of(Progress)) == 1
    assert not set.union(*digests([swarm.members["anna"]]).values()) & set.union(
        *digests([swarm.members["ben"]]).values()
    )


@pytest.mark.promise("Without delayed updates trainers agree too")
def test_without_delayed_updates_peers_agree_too(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run(optimizer={"delayed": False}, schedule={"total_steps": 5}))
    swarm.start_trainer("anna", batch_size=4, seed=0)
    swarm.start_trainer("ben", batch_size=4, seed=1)
    wait_for_step(swarm, 5, "anna", "ben")
    assert_agreed(list(swarm.members.values()))


@pytest.mark.promise("The aux peer alone hands the state to those who return", also="tests/auxiliary/test_keeper.py")
def test_the_aux_peer_alone_hands_the_state_to_those_who_return(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    swarm.start_trainer("anna", batch_size=4, seed=0)
    wait_for_step(swarm, 3, "anna")
    aux = swarm.members["aux"]
    assert swarm.wait(lambda: bool(aux.of(Saved)), WAIT)
    held = max(event.epoch for event in aux.of(Saved))
    assert swarm.wait(lambda: max(event.epoch for event in aux.of(Saved)) > held, WAIT)
    swarm.members["anna"].worker.kill()
    swarm.members["anna"].worker.wait(WAIT)
    held = max(event.epoch for event in aux.of(Saved))
    newcomer = swarm.start_trainer("ben", batch_size=4, seed=1)
    assert swarm.wait(lambda: bool(newcomer.of(Step)), WAIT)
    assert newcomer.of(Synchronised)[0].epoch >= held
    assert newcomer.of(Step)[0].epoch == newcomer.of(Synchronised)[0].epoch + 1


@pytest.mark.promise(
    "A swarm that ended goes on from the newest backup among its peers", also="tests/peer/test_backup.py"
)
def test_a_swarm_that_died_goes_on_from_the_newest_backup_among_its_peers(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    for seed, name in enumerate(("anna", "ben")):
        swarm.start_trainer(name, batch_size=4, seed=seed)
    wait_for_step(swarm, 1, "anna", "ben")
    swarm.leave("anna")
    older = swarm.members["anna"].of(Saved)[-1].epoch
    wait_for_step(swarm, older + 3, "ben")
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

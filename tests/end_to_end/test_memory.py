"""Real peers whose memory runs out, or whose device fails: they go on, or end with a backup, to begin anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, digests, last_step, tiny_run, wait_for_step
from testbed.faults import Faults

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.memory import DalleAccount
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Choice, Failure, Log, Progress, Round, Saved, Synchronised
from tt_cli.supervisor.local_swarm import LocalSwarm

StartSwarm = Callable[[RunConfig], LocalSwarm]


@pytest.mark.promise(
    "A peer whose memory runs out amid a step halves its micro-batch and loses no sample",
    also="tests/peer/test_batch.py",
)
@pytest.mark.promise(
    "A peer that takes more than --memory begins anew from a backup", also="tests/peer/test_memory_watch.py"
)
def test_peers_that_run_out_of_memory_go_on(start_swarm: StartSwarm) -> None:
    """anna halves her micro-batch in the midst of step 2; ben leaks, and gives way when he takes more than --memory."""
    run = tiny_run()
    swarm = start_swarm(run)
    limit = DalleAccount(run).need("cpu").host + (250 << 20)
    anna = swarm.start_trainer("anna", short={"step": 2, "fits": 2}, patient=False, batch_size=8, seed=0)
    leaking = {"step": 2, "leak": 80}
    ben = swarm.start_trainer("ben", short=leaking, patient=False, batch_size=1, seed=1, memory=limit)

    assert swarm.wait(lambda: not ben.running, WAIT), "ben should have given way"
    (failure,) = ben.of(Failure)
    assert failure.exit_code == 75 and "of --memory: beginning anew from a backup" in failure.message
    markers = [file.name for file in ben.home.glob("runs/*/*restarted*")]
    assert markers == ["trainer.restarted-for-memory"], "another peer of his machine may give way as soon"
    (saved,) = ben.of(Saved)
    assert last_step(ben) - 1 <= saved.epoch <= last_step(ben)  # a round may end while the backup is written

    state = load(Path(saved.path))
    assert digests([ben])[saved.epoch] == {state.digest()}, "the next process goes on from here"

    wait_for_step(swarm, saved.epoch + 1, "anna")
    assert_agreed([anna, ben])
    sizes = [event.value for event in anna.of(Choice) if event.what == "micro-batch"]
    assert sizes == ["8", "4", "2"]
    told = [event.message for event in anna.of(Log) if "memory ran out" in event.message]
    assert len(told) == 2 and told[0].endswith("going on with 4 examples at a time")
    assert not anna.of(Synchronised) or anna.of(Synchronised)[-1].epoch < 2, "no step was lost"
    samples = [event.my_samples for event in anna.of(Progress)]
    assert samples == sorted(samples) and all(count % 2 == 0 for count in samples)
    steps = [event for event in anna.of(Round) if event.outcome in ("alone", "committed")]
    short = [event for event in steps if event.samples < run.swarm.target_batch_size]
    assert len(short) <= 1, "only the round that ben counted for and did not come to"


@pytest.mark.promise("A peer whose device fails ends with a backup of its newest step, to begin anew")
def test_a_device_that_fails_costs_no_step(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(tiny_run())
    faults = Faults().fail_at("anna", 3, "device error").of("anna")
    anna = swarm.start_trainer("anna", faults=faults, batch_size=8, seed=0)
    assert swarm.wait(lambda: not anna.running, WAIT)
    (failure,), (saved,) = anna.of(Failure), anna.of(Saved)
    assert failure.exit_code == 75 and "failed (CUDA error: unspecified launch failure)" in failure.message
    assert saved.epoch == last_step(anna) and {load(Path(saved.path)).digest()} == digests([anna])[saved.epoch]

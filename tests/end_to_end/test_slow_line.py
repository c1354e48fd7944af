"""A newcomer on a line on which a state takes longer than a step: it arrives, with the steps that it missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, tiny_run, wait_for_step

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Contribution, Log, Synchronised
from tt_cli.supervisor.local_swarm import LocalSwarm

STEP_SECONDS = 3.0  # two trainers, each with two paced micro-batches of 24 for a step of 96
LINE = 1.5e6  # bits a second: 8 s for the state alone, which is six averages, and two averages in a step


@pytest.mark.promise(
    "A newcomer whose state takes longer than a step replays the steps it missed, and contributes",
    also="tests/swarm/test_missed.py",
)
def test_a_newcomer_on_a_slow_line_catches_up_and_contributes(start_swarm: Callable[[RunConfig], LocalSwarm]) -> None:
    settings = {"statistics_expiration": 30.0, "target_batch_size": 96}
    swarm = start_swarm(tiny_run(model={"dim": 64, "heads": 4, "depth": 2}, swarm=settings))
    paced = {"batch_size": 24, "pace": STEP_SECONDS / 2}
    for seed, name in enumerate(("one", "two")):
        swarm.start_trainer(name, seed=seed, **paced)
    wait_for_step(swarm, 2, "one", "two")
    slow = swarm.start_trainer("slow", seed=2, max_download=LINE, **paced)
    assert swarm.wait(lambda: bool(slow.of(Contribution)), WAIT), slow.worker.log.read_text()
    missed = [event.message for event in slow.of(Log) if "that the others made meanwhile" in event.message]
    states = [event for event in slow.of(Synchronised) if event.chunks]
    assert len(states) == 1 and missed, (states, missed)
    wait_for_step(swarm, last_step(slow) + 2, "one", "two", "slow")
    assert_agreed([swarm.members[name] for name in ("one", "two", "slow")])
    assert committed(slow)

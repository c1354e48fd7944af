"""Real peers whose global steps are averages of their own, inner ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, tiny_run, wait_for_step

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Choice, Progress, Round, Synchronised
from tt_cli.supervisor.local_swarm import LocalSwarm


@pytest.mark.promise(
    "With local steps all hold the same parameters to the last bit, a late joiner too, and a kill changes nothing",
    also="tests/peer/test_local_steps.py",
)
def test_members_of_local_steps_agree_with_a_late_joiner_and_a_kill(
    start_swarm: Callable[[RunConfig], LocalSwarm],
) -> None:
    optimizer = {"name": "local", "inner_batch": 8}
    changes = {"optimizer": optimizer, "schedule.peak_lr": 4e-3, "swarm.target_batch_size": 96}
    swarm = start_swarm(tiny_run().replaced(changes))
    anna, ben = (swarm.start_trainer(name, batch_size=8, seed=seed) for seed, name in enumerate(("anna", "ben")))
    wait_for_step(swarm, 2, "anna", "ben")
    late = swarm.start_trainer("cleo", batch_size=8, seed=2)
    assert swarm.wait(lambda: any(len(event.members) == 3 for event in committed(late)), WAIT), late.of(Round)
    assert late.of(Synchronised)[0].source not in ("", "seed")

    os.kill(ben.worker.pid, signal.SIGKILL)
    wait_for_step(swarm, last_step(anna) + 2, "anna", "cleo")
    assert_agreed([anna, ben, late, swarm.members["aux"]])
    told = anna.of(Progress)
    assert max(event.inner_steps or 0 for event in told) > 1
    due = [(event.inner_steps or 0, event.inner_steps_due) for event in told if event.inner_steps_due is not None]
    assert due and all(made <= of for made, of in due) and any(made < of for made, of in due)
    assert min(told[-1].sent_per_hour, told[-1].received_per_hour) > 0
    assert [event.value for event in anna.of(Choice) if event.what == "inner optimizer"] == ["AdamW"]

"""Real peers whose global steps are averages of their own, inner ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from end_to_end.conftest import joined_late_and_killed, tiny_run

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Choice, Progress
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
    changes["swarm.large_tensor"] = 1024  # from which messages are sparse
    swarm = start_swarm(tiny_run().replaced(changes))
    anna = joined_late_and_killed(swarm, batch_size=8)
    told = anna.of(Progress)
    assert max(event.inner_steps or 0 for event in told) > 1
    due = [(event.inner_steps or 0, event.inner_steps_due) for event in told if event.inner_steps_due is not None]
    assert due and all(made <= of for made, of in due) and any(made < of for made, of in due)
    assert min(told[-1].sent_per_hour, told[-1].received_per_hour) > 0
    assert [event.value for event in anna.of(Choice) if event.what == "inner optimizer"] == ["AdamW"]

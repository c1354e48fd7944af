"""The training task behind one interface: `task_of(run)` builds the model, names its parameters, computes its loss.

The peers, the auxiliary peer and the swarm's checks know names, shapes, one loss and a few named figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.task.dalle_task import DalleTask


def task_of(run: RunConfig) -> DalleTask:
    """The task of a run. Loads torch."""
    from tt_cli.task.dalle_task import DalleTask

    return DalleTask(run)

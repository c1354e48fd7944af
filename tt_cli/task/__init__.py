"""The training task behind one interface: `task_of(run)` is what a run of its kind trains, see `task.Task`.

The peers, the auxiliary peer and the swarm's checks know names, shapes, one loss and a few named figures.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.task.task import Task


def task_of(run: RunConfig) -> Task[Any]:
    """The task of a run. Loads no torch by itself."""
    task: Task[Any] = resolve_name(run.task_class)(run)
    return task

"""The training task behind one interface: `task_of(run)` is what a run of its kind trains, see `task.Task`.

The peers, the auxiliary peer and the swarm's checks know names, shapes, one loss and a few named figures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.task.task import Task


def task_of(run: RunConfig) -> Task[Any]:
    """The task of a run. Loads no torch by itself."""
    module, _, name = run.task_class.partition(":")
    task: Task[Any] = getattr(import_module(module), name)(run)
    return task

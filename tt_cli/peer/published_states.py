"""Checkpoints as states that this peer can become: the newest one that a run publishes, and the one of an order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree

from tt_cli.checkpoint.checkpoint_files import find, load
from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.errors import TTError
from tt_cli.hub.hub_files import download, repository_files
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig, folders
from tt_cli.run.checkpoint_names import name_of, step_in
from tt_cli.run.sections import HUB_PLACE
from tt_cli.swarm.shared_state import StateLoader, TreeReader
from tt_cli.swarm.state.bridge import StateBuffer

PublishedState = tuple[StateTree, StateBuffer, str]
"""Its tree, its bytes, and where it lies."""


def newest_published(run: RunConfig, read_tree: TreeReader) -> PublishedState:
    """The newest checkpoint of the run's repository. Raises TTError when there is none, or none to train on.

    It is checked as any checkpoint (digest, finite numbers), and must be of this run and have its tensors. One that was
    taken before is removed: the client's own cache would keep them all.
    """
    repository = run.checkpoints.repository or ""
    commit, names = repository_files(repository)
    steps = [(step, name) for name in names if (step := step_in(Path(name).name)) is not None]
    if not steps:
        raise TTError(f"{repository} on the Hub holds no checkpoint (step-*.safetensors) yet")
    name, taken = max(steps)[1], folders.run_folder(run) / "published"
    for other in set(taken.glob("*")) - {taken / Path(name).name}:
        rmtree(other, ignore_errors=True)
    state = load(download(repository, name, commit, taken / Path(name).name))
    return _as_state(run, read_tree, state, f"{repository}/{name} at {commit[:12]}")


def ways_back(run: RunConfig, read_tree: TreeReader, order: RollBack) -> Iterator[StateLoader]:
    """Sources of the checkpoint of an order: this machine, and the place that the order names.

    That is a repository on the Hub, with @REVISION if need be, or a file on this machine.
    """
    own = find(folders.checkpoints(run), run.identity, order.step, order.digest)
    if own is not None:
        yield partial(_as_state, run, read_tree, own[1], str(own[0]))
    elif Path(order.source).is_file():
        yield lambda: _as_state(run, read_tree, load(Path(order.source)), order.source)
    elif match := HUB_PLACE.fullmatch(order.source):
        (repository, revision), name = match.groups(), name_of(order.step)
        place = f"{repository}/{name} at {(revision or 'main')[:12]}"
        yield lambda: _as_state(run, read_tree, load(download(repository, name, revision)), place)


def _as_state(run: RunConfig, read_tree: TreeReader, state: TrainingState, place: str) -> PublishedState:
    if state.identity != run.identity:
        raise TTError(f"{place} belongs to run {state.identity}, not {run.identity}: the organiser must replace it")
    if not state.optimizer:
        raise TTError(f"{place} holds weights to draw with, not the optimizer's state to train on")
    tree = state.tree()
    try:
        read_tree(tree.manifest())
    except ValueError as error:
        raise TTError(f"{place} is {error}") from error
    buffer = StateBuffer.new()
    state.write_into(tree, buffer.write)
    return tree, buffer, place

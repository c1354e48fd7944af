"""The newest checkpoint that a run publishes on the Hub, as a state that this peer can become."""

from __future__ import annotations

import re

from tt_cli.checkpoint import StateTree, load
from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.run.hub import download, repository_files
from tt_cli.swarm.handover import StateBuffer
from tt_cli.swarm.shared import TreeReader

_STEP = re.compile(r"(?:.*/)?step-(\d{8,15})\.safetensors")


def newest_published(run: RunConfig, read_tree: TreeReader) -> tuple[StateTree, StateBuffer, str]:
    """Its tree, its bytes, and where it lies. Raises TTError when there is none, or none to train on.

    It is checked as any checkpoint (digest, finite numbers), and must be of this run and have its tensors.
    """
    repository = run.checkpoints.repository or ""
    commit, names = repository_files(repository)
    steps = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    if not steps:
        raise TTError(f"{repository} on the Hub holds no checkpoint (step-*.safetensors) yet")
    place = f"{repository}/{max(steps)[1]} at {commit[:12]}"
    state = load(download(repository, max(steps)[1], commit))
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

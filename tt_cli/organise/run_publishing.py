"""A run onto the Hub: run file and card in one commit, so that volunteers type `tt join OWNER/NAME`."""

from __future__ import annotations

from pathlib import Path

from tt_cli.hub.repository import CARD, commit
from tt_cli.run import load_run
from tt_cli.run.model_card import card
from tt_cli.run.run_source import RUN_FILE, run_repository


def publish(folder: Path, repository: str) -> str:
    """Put the folder's run file and card into a model repository, made where it is missing. Returns its address.

    A card that is there with the run already stays: it lists checkpoints, and its organiser may have edited it.
    Raises UsageError where another run's file is there or the Hub refuses, TTError when it does not answer.
    """
    from huggingface_hub import CommitOperationAdd

    run = load_run(str(folder / RUN_FILE))
    action = f"cannot publish {run.run.name} in {repository}"
    place = run_repository(repository, run, action)
    contents = {name: (folder / name).read_bytes() for name in (RUN_FILE, CARD)}
    if {RUN_FILE, CARD} <= place.files:
        del contents[CARD]
    elif contents[CARD] == card(run).encode():  # as it was made, where the run file may name no repository
        contents[CARD] = card(run.replaced({"checkpoints.repository": repository})).encode()
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
    return str(commit(place, operations, f"The run {run.identity}", action).repo_url)

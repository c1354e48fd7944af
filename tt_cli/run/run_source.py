"""Sources of a run: a built-in name, a TOML file, or a repository on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from tt_cli.errors import UsageError, nearest, os_errors
from tt_cli.hub.hub_files import download
from tt_cli.hub.repository import Repository, open_repository, read_text
from tt_cli.run.run_config import RunConfig
from tt_cli.run.sections import HUB_NAME

RUN_FILE = "run.toml"  # its name in a Hub repository
_MAX_BYTES = 1 << 20


def builtin_runs() -> dict[str, Path]:
    """Return the run files that come with `tt`, by name."""
    packaged = Path(__file__).parent / "builtin"  # in an installed wheel
    folder = packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_run(name: str) -> RunConfig:
    """Read the run called `name`: a built-in run, a file's path, or "organisation/repository" on the Hub.

    Raises UsageError for a name, file or repository that is not there or is wrong, TTError when the Hub
    cannot be reached.
    """
    builtin = builtin_runs()
    if name in builtin:
        return _read(builtin[name], f"built-in run {name}")
    path = Path(os.path.expanduser(name))  # these two also take what can be no path
    if os.path.isfile(path) or name.endswith(".toml") or name.startswith((".", "/", "~")):
        return _read(path, str(path))
    if HUB_NAME.fullmatch(name):
        return _read(download(name, RUN_FILE), f"{RUN_FILE} of {name}")
    meant = nearest(name, builtin, otherwise="")
    hint = f"{meant} Built in" if meant else "built in"
    raise UsageError(
        f"no run is called '{name}'; {hint} are {', '.join(builtin)}; "
        "else give a .toml file or ORGANISATION/REPOSITORY on the Hub"
    )


def name_for_others(name: str, run: RunConfig) -> str:
    """The name that others type for the run called `name` here: the path of a file means nothing on their machines."""
    if name in builtin_runs() or not (name.endswith(".toml") or os.path.isfile(os.path.expanduser(name))):
        return name
    return run.checkpoints.repository or Path(name).name


def _read(path: Path, origin: str) -> RunConfig:
    with os_errors(f"cannot read the run file {path}", kind=UsageError), path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{origin}: over 1 MiB; a run file is a short TOML file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{origin}, line {line}: not UTF-8 text, which TOML must be") from None
    return RunConfig.from_toml(text, origin)


def run_repository(name: str, run: RunConfig, action: str, *, private: bool | None = None) -> Repository:
    """The run's repository on the Hub, made where it is missing. private: then; None as its owner's settings have it.

    Raises UsageError, beginning with `action`, where another run's file is there or the Hub refuses, HubUnreachable.
    """
    repository = open_repository(name, action, private=private)
    if RUN_FILE in repository.files:
        there = RunConfig.from_toml(read_text(repository, RUN_FILE, action), f"{RUN_FILE} of {name}")
        if there.identity != run.identity:
            raise UsageError(
                f"{action}: it holds the run {there.identity} already; name another (--repository of `tt init`, or "
                "[checkpoints] repository in the run file)"
            )
    return repository

"""The folders of `tt`: one for the user, one in it for each run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tt_cli.errors import TTError, os_errors

if TYPE_CHECKING:
    from tt_cli.run.run_config import RunConfig

_ADVICE = "set TT_HOME to a folder that you can write to"


def home() -> Path:
    """Return $TT_HOME or ~/.local/share/tt, made with mode 0700 where it is missing.

    Raises TTError when it cannot be made or written to.
    """
    named = os.environ.get("TT_HOME")
    try:
        folder = Path(named).expanduser() if named else Path.home() / ".local" / "share" / "tt"
        return _made(folder.absolute())
    except (RuntimeError, FileNotFoundError):  # nobody has that name, or the folder that one is in is gone
        raise TTError(f"cannot tell where {named or 'your home folder'} is; {_ADVICE}") from None


def run_folder(run: RunConfig) -> Path:
    """Return the folder of this run; runs whose training differs have different folders."""
    return _made(home() / "runs" / run.identity)


def checkpoints(run: RunConfig) -> Path:
    """Return the folder of this run's checkpoints."""
    return _made(run_folder(run) / "checkpoints")


def accusations(run: RunConfig) -> Path:
    """Return where proofs against members are kept; the folder is made with the first."""
    return run_folder(run) / "accusations"


def _made(folder: Path) -> Path:
    with os_errors(f"cannot make the folder {folder}", _ADVICE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TTError(f"cannot write to the folder {folder}: it is read-only for you; {_ADVICE}")
    return folder

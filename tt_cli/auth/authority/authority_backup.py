"""An authority in one file, keys and database together, and back."""

from __future__ import annotations

import datetime
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.auth.authority.authority_folder import AuthorityFolder, AuthoritySettings
from tt_cli.auth.authority.authority_server import open_store
from tt_cli.auth.authority.member_store import MemberStore
from tt_cli.errors import UsageError, os_errors
from tt_cli.run import RunConfig

FORMAT = "tt-authority-backup-1"


def back_up(run: RunConfig, file: Path, now: float, *, force: bool = False) -> None:
    """Write everything to `file`, mode 0600. Raises UsageError where it exists and not `force`, TTError."""
    if file.exists() and not force:
        raise UsageError(f"{file} exists: choose another name, or --force")
    folder = AuthorityFolder(run)
    with closing(open_store(folder)) as store:
        tables = store.dump()
    content = {
        "format": FORMAT,
        "run": run.identity,
        "at": now,
        "settings": folder.settings().to_data(),
        "tables": tables,
    }
    with os_errors(f"cannot write {file}", "free space"):
        atomic_write(file, json.dumps(content), mode=PRIVATE)


def restore(run: RunConfig, file: Path, now: float, *, database: str | None = None, force: bool = False) -> str:
    """Put a backup's tables in place, and its keys where none are here. Returns the time of the backup, in words.

    database: another URL than the one in the backup. force: replace what is here, keys too. Raises UsageError for a
    file that is no backup of this run, or where there is an authority with a database and not `force`.
    """
    content = _read(file)
    if content.get("run") != run.identity:
        raise UsageError(f"{file} is a backup of run {content.get('run')}, not of {run.identity}")
    folder = AuthorityFolder(run)
    try:
        settings = AuthoritySettings.from_data(content["settings"])
        if folder.exists and not force and _has_database(folder):
            raise UsageError(f"an authority of this run is here: it would be replaced; say --force for that ({file})")
        if folder.exists and not force:  # they may be newer than the backup's
            settings = folder.settings()
        if database is not None:
            settings = replace(settings, database=database)
        folder.write(settings)
        with closing(MemberStore(folder.database_url())) as store:
            store.load(content["tables"], now)
            store.write_down(now, "organiser", "restored", detail=str(content["at"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{file} is damaged ({error}): take another backup") from error
    return datetime.datetime.fromtimestamp(float(content["at"]), datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _has_database(folder: AuthorityFolder) -> bool:
    with closing(MemberStore(folder.database_url())) as store:
        return store.founded


def _read(file: Path) -> dict[str, Any]:
    try:
        with os_errors(f"cannot read {file}", kind=UsageError):
            content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is no backup: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{file} is no backup of an authority")
    return content

"""An authority in one file, keys and database together, and back."""

from __future__ import annotations

import datetime
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.auth.authority.authority_folder import AuthorityFolder, AuthoritySettings
from tt_cli.auth.authority.authority_server import open_store
from tt_cli.auth.authority.member_store import MemberStore
from tt_cli.errors import UsageError, os_errors
from tt_cli.run import RunConfig


class Backup(BaseModel):
    """A backup's file. run: its identity. at: Unix time. tables: as `MemberStore.dump` gives them."""

    format: Literal["tt-authority-backup-1"] = "tt-authority-backup-1"
    run: str
    at: float
    settings: AuthoritySettings
    tables: dict[str, list[dict[str, Any]]]


def back_up(run: RunConfig, file: Path, now: float, *, force: bool = False) -> None:
    """Write everything to `file`, mode 0600. Raises UsageError where it exists and not `force`, TTError."""
    if file.exists() and not force:
        raise UsageError(f"{file} exists: choose another name, or --force")
    folder = AuthorityFolder(run)
    with closing(open_store(folder)) as store:
        backup = Backup(run=run.identity, at=now, settings=folder.settings(), tables=store.dump())
    with os_errors(f"cannot write {file}", "free space"):
        atomic_write(file, backup.model_dump_json(), mode=PRIVATE)


def restore(run: RunConfig, file: Path, now: float, *, database: str | None = None, force: bool = False) -> str:
    """Put a backup's tables in place, and its keys where none are here. Returns the time of the backup, in words.

    database: another URL than the one in the backup. force: replace what is here, keys too. Raises UsageError for a
    file that is no backup of this run, or where there is an authority with a database and not `force`.
    """
    with os_errors(f"cannot read {file}", kind=UsageError):
        content = file.read_bytes()
    try:
        backup = Backup.model_validate_json(content)
    except ValidationError as error:
        raise UsageError(f"{file} is no backup of an authority ({error.errors()[0]['msg']})") from None
    if backup.run != run.identity:
        raise UsageError(f"{file} is a backup of run {backup.run}, not of {run.identity}")
    folder, settings = AuthorityFolder(run), backup.settings
    if folder.exists and not force:  # its keys may be newer than the backup's
        with closing(MemberStore(folder.database_url())) as store:
            if store.founded:
                there = f"an authority of this run is here: it would be replaced; say --force for that ({file})"
                raise UsageError(there)
        settings = folder.settings()
    if database is not None:
        settings = settings.model_copy(update={"database": database})
    with os_errors(f"cannot make {folder.path}", "free space"):
        folder.path.mkdir(mode=0o700, exist_ok=True)
    with closing(MemberStore(folder.database_url(settings))) as store:
        try:
            store.load(backup.tables, now)
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{file} is damaged ({error}): take another backup") from error
        folder.write(settings)  # not before: with a damaged backup the keys that are here would be lost
        store.write_down(now, "organiser", "restored", detail=str(backup.at))
    return datetime.datetime.fromtimestamp(backup.at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")

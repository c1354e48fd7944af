"""The identities of this machine's peers in one run: list, export into one file, import again."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import UsageError, os_errors
from tt_cli.identity import peer_key
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.slot import claim_name, try_lock


class Exported(BaseModel):
    """An exported file. keys: by their names."""

    format: Literal["tt-identity-1"]
    run: str
    keys: dict[Annotated[str, Field(pattern=r"^[\w-]+$")], Base64Bytes]


def identities(run: RunConfig) -> dict[str, str]:
    """Peer ids by the name of the key, "trainer" or "aux". Raises TTError for a damaged file."""
    paths = sorted(folders.run_folder(run).glob("*.key"))
    return {path.stem: _peer_id(path, _bytes(path)) for path in paths}


def export_identities(run: RunConfig, file: Path, *, force: bool = False) -> dict[str, str]:
    """Write all keys to `file`, mode 0600. Returns them as `identities` does. Raises UsageError, TTError."""
    peer_ids = identities(run)
    if not peer_ids:
        raise UsageError(f"there is no identity of run {run.run.name} here yet: join it first")
    if file.exists() and not force:
        raise UsageError(f"{file} exists: choose another name, or --force")
    folder = folders.run_folder(run)
    keys = {name: base64.b64encode(_bytes(folder / f"{name}.key")).decode() for name in peer_ids}
    content = {"format": "tt-identity-1", "run": run.identity, "keys": keys}
    with os_errors(f"cannot write {file}", "free space"):
        atomic_write(file, json.dumps(content, indent=1), mode=PRIVATE)
    return peer_ids


def import_identities(run: RunConfig, file: Path, *, force: bool = False) -> dict[str, str]:
    """Put an exported file's keys in place. Raises UsageError where others are there and not `force`, or in use."""
    with os_errors(f"cannot read {file}", kind=UsageError):
        content = file.read_bytes()
    try:
        exported = Exported.model_validate_json(content)
    except ValidationError as error:
        raise UsageError(f"{file} is no exported identity ({error.errors()[0]['msg']})") from None
    if exported.run != run.identity:
        raise UsageError(f"{file} holds identities of run {exported.run}, not of {run.identity}")
    folder, keys = folders.run_folder(run), exported.keys
    peer_ids = {name: _peer_id(file, data) for name, data in keys.items()}
    for name, data in keys.items():
        path = folder / f"{name}.key"
        if path.exists() and _bytes(path) != data:
            if not force:
                raise UsageError(f"{path} is another identity: it would be lost; say --force for that")
            if try_lock(path.with_suffix(".lock")) is None:
                raise UsageError(f"a peer on this machine uses {path}: stop it first")
    with os_errors(f"cannot write into {folder}", "free space"):
        for name, data in keys.items():
            atomic_write(folder / f"{name}.key", data, mode=PRIVATE)
    return peer_ids


def free_identity(run: RunConfig, role: str) -> str:
    """The name of the first identity of `role` that no process here uses: the one that it will claim."""
    name, lock = claim_name(folders.run_folder(run), role)
    lock.close()
    return name


def _peer_id(path: Path, data: bytes) -> str:
    return peer_key.id_of(peer_key.key_of_file(path, data))


def _bytes(path: Path) -> bytes:
    with os_errors(f"cannot read {path}"):
        return path.read_bytes()

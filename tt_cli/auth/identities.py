"""The identities of this machine's peers in one run: list, export into one file, import again."""

from __future__ import annotations

import base64
import fcntl
import json
from pathlib import Path
from typing import Any

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.identity import peer_key
from tt_cli.run import RunConfig, folders

FORMAT = "tt-identity-1"


def identities(run: RunConfig) -> dict[str, str]:
    """Peer ids by the name of the key, "trainer" or "aux". Raises TTError for a damaged file."""
    found = {}
    for path in sorted(folders.run_folder(run).glob("*.key")):
        found[path.stem] = _peer_id(path, _bytes(path))
    return found


def export_identities(run: RunConfig, file: Path, *, force: bool = False) -> dict[str, str]:
    """Write all keys to `file`, mode 0600. Returns them as `identities` does. Raises UsageError, TTError."""
    found = identities(run)
    if not found:
        raise UsageError(f"there is no identity of run {run.run.name} here yet: join it first")
    if file.exists() and not force:
        raise UsageError(f"{file} exists: choose another name, or --force")
    folder = folders.run_folder(run)
    keys = {name: base64.b64encode(_bytes(folder / f"{name}.key")).decode() for name in found}
    content = {"format": FORMAT, "run": run.identity, "keys": keys}
    _write(file, json.dumps(content, indent=1).encode())
    return found


def import_identities(run: RunConfig, file: Path, *, force: bool = False) -> dict[str, str]:
    """Put an exported file's keys in place. Raises UsageError where others are there and not `force`, or in use."""
    folder = folders.run_folder(run)
    keys = _exported(run, file)
    found = {name: _peer_id(file, data) for name, data in keys.items()}
    for name, data in keys.items():
        path = folder / f"{name}.key"
        if path.exists() and _bytes(path) != data:
            if not force:
                raise UsageError(f"{path} is another identity: it would be lost; say --force for that")
            if _in_use(path):
                raise UsageError(f"a peer on this machine uses {path}: stop it first")
    for name, data in keys.items():
        _write(folder / f"{name}.key", data)
    return found


def free_identity(run: RunConfig, role: str) -> str:
    """The name of the first identity of `role` that no process here uses: the one that it will claim."""
    folder, number = folders.run_folder(run), 1
    while _in_use(folder / f"{(name := role if number == 1 else f'{role}-{number}')}.key"):
        number += 1
    return name


def _exported(run: RunConfig, file: Path) -> dict[str, bytes]:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError("another format")
        of, keys = content["run"], {str(name): base64.b64decode(data) for name, data in content["keys"].items()}
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is no exported identity ({error})") from None
    if of != run.identity:
        raise UsageError(f"{file} holds identities of run {of}, not of {run.identity}")
    if any(not name.replace("-", "").isalnum() for name in keys):
        raise UsageError(f"{file} is no exported identity (a name that is none)")
    return keys


def _in_use(path: Path) -> bool:
    try:
        with path.with_suffix(".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock: never used
        return False
    return False


def _peer_id(path: Path, data: bytes) -> str:
    try:
        return peer_key.peer_id(peer_key.public_der(peer_key.private_key(data).public_key()))
    except ValueError as error:
        raise TTError(f"{path} is no identity file ({error}): move it away to get a new identity") from error


def _bytes(path: Path) -> bytes:
    with os_errors(f"cannot read {path}"):
        return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    with os_errors(f"cannot write {path}"):
        atomic_write(path, data, mode=PRIVATE)

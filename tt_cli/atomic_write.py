"""Files that appear under their names whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PRIVATE = 0o600  # for its owner alone


@contextlib.contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o666, durable: bool = True, replace: bool = True
) -> Iterator[io.BufferedRandom]:
    """A file to write to, and to read from, that takes the name `path` at the end of the block; none after an error.

    It lies beside `path` meanwhile, locked, so that two writers come one after the other and what a killed one left is
    told from what a live one writes. mode: its permissions from creation on, less the umask. durable: the content and
    the name are on the disk when this returns. replace: also a file that has this name; else that one stays. Raises
    OSError.
    """
    with _created(path.with_name(f".{path.name}.tmp"), mode) as file:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # root leaves a file to its owner, who could not read it any more
            if os.geteuid() == 0 and (there := path.lstat()).st_uid == path.parent.stat().st_uid:
                os.fchown(file.fileno(), there.st_uid, there.st_gid)
        if replace or not path.exists():
            os.replace(file.name, path)
    if durable:
        _sync_folder(path.parent)


def atomic_write(
    path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = True, replace: bool = True
) -> None:
    """Make `content`, text as UTF-8, the content of a file, as `atomic_file` does. Raises OSError."""
    with atomic_file(path, mode=mode, durable=durable, replace=replace) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_abandoned(temporary: Path, *, wait: bool = False) -> None:
    """Remove what a writer that died left behind. wait: for one that lives, until it is done; else leave it alone."""
    mode = "r+b" if os.access(temporary, os.W_OK) else "rb"  # NFS locks for one alone what is open to be written to
    with contextlib.suppress(FileNotFoundError), temporary.open(mode) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # a disk without locks
            pass
        _remove(temporary, file)


@contextlib.contextmanager
def _created(temporary: Path, mode: int) -> Iterator[io.BufferedRandom]:
    """A new file, locked while it is open; removed where it has not been renamed by the end."""
    while True:
        try:
            file = io.BufferedRandom(io.FileIO(temporary, "x+", opener=lambda name, flags: os.open(name, flags, mode)))
        except FileExistsError:
            remove_abandoned(temporary, wait=True)
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # removed as abandoned before it was locked
    with file:
        try:
            yield file
        finally:
            _remove(temporary, file)


def _remove(temporary: Path, file: IO[bytes]) -> None:
    """Remove the name if it is this file's still, not a later one's."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Downloaded shards on the disk: few bytes, oldest use out first, whole and checked, shared by processes.

A shard is one file, KEY.SHA256.shard; what is still coming is KEY.NAME.part, at the size it will have, locked by its
process. That is all there is to know, so a process that is killed leaves nothing wrong: a part that nobody locks is
removed by the next one. One lock file keeps two processes from counting at the same time; nobody holds it for longer
than that. A file that one process reads and another removes stays readable until it is closed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from tt_cli.atomic_write import remove_abandoned
from tt_cli.data.stream.transfer import Received, ShardProblem

IN_MEMORY = 64 << 20  # bytes of a shard that is not kept and need not touch the disk

Fetch = Callable[[BinaryIO, Callable[[int], None]], Received]


class ShardCache:
    """A folder of shards, of at most `cap` bytes together. note: hears why shards are not kept, once."""

    def __init__(self, folder: Path, cap: int, note: Callable[[str], None]) -> None:
        self.folder, self.cap, self._note = folder, cap, note
        self._of_use = cap > 0

    def find(self, content: str) -> BinaryIO | None:
        """The shard of this content, checked; None where it is not there. content: what tells it from all others."""
        with suppress(OSError):  # removed meanwhile, or unreadable: it is fetched
            for path in self.folder.glob(f"{_key(content)}.*.shard"):
                file = path.open("rb")
                if hashlib.file_digest(file, "sha256").hexdigest() == path.name.split(".")[1]:
                    file.seek(0)
                    with suppress(OSError):  # of a disk that can only be read
                        os.utime(path)
                    return file
                file.close()
                path.unlink(missing_ok=True)
        return None

    def bring(self, content: str, fetch: Fetch) -> BinaryIO:
        """The shard, from here or from `fetch`, at its beginning. Raises what `fetch` raises, but for OSError.

        Where there is no room on the disk, it is held in memory.
        """
        if (kept := self.find(content)) is not None:
            return kept
        if self._of_use:
            try:
                return self._kept(_key(content), fetch)
            except _TooLarge:
                pass
            except OSError as error:
                self._of_use = error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM)  # a full disk may pass
                self._note(
                    f"shards are not kept in {self.folder} ({error.strerror or error}): free some space; until then a "
                    "restart downloads again"
                )
                self._note = lambda words: None
        file = cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=IN_MEMORY))  # noqa: SIM115 - the caller closes it
        try:
            fetch(file, lambda size: None)
        except OSError:  # it was too large for memory, and the disk is full
            file.close()
            file = io.BytesIO()
            try:
                fetch(file, lambda size: None)
            except MemoryError as error:
                raise ShardProblem("there is no room for it, on the disk or in memory", lasting=True) from error
        file.seek(0)
        return file

    def remove(self, content: str) -> None:
        """Forget a shard that turned out to be of no use."""
        for path in self.folder.glob(f"{_key(content)}.*.shard"):
            path.unlink(missing_ok=True)

    def _kept(self, key: str, fetch: Fetch) -> BinaryIO:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._alone():  # or who counts meanwhile takes it for abandoned
            descriptor, name = tempfile.mkstemp(".part", f"{key}.", self.folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open(descriptor, "w+b") as file:
            part = Path(name)
            try:
                received = fetch(file, lambda size: self._make_room(part, file, size))
                file.flush()
                self._make_room(part, file, received.bytes)  # it may not have been announced, or otherwise
                path = self.folder / f"{key}.{received.sha256}.shard"
                with self._alone():  # or who counts meanwhile may see neither name
                    os.replace(part, path)
                    return path.open("rb")
            finally:
                part.unlink(missing_ok=True)

    def _make_room(self, part: Path, file: IO[bytes], size: int) -> None:
        """Remove abandoned parts, and old shards until `size` bytes fit; take them. Raises _TooLarge, OSError."""
        if size > self.cap:
            raise _TooLarge
        with self._alone():
            files = [entry for entry in sorted(self._files()) if entry[-1] != part]
            total = sum(taken for *_, taken, _ in files)
            for is_shard, _, taken, path in files:
                if not is_shard:
                    remove_abandoned(path)
                elif total + size > self.cap:
                    path.unlink(missing_ok=True)
                total -= 0 if path.exists() else taken
            if total + size > self.cap:  # others are fetching as much
                raise _TooLarge
            if size:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is found out before anything was sent
            os.truncate(file.fileno(), size)

    def _files(self) -> Iterator[tuple[bool, float, int, Path]]:
        """Whether it is a whole shard, time of the last use, size, path."""
        for path in self.folder.glob("*.*"):
            if path.suffix in (".shard", ".part"):
                with suppress(OSError):
                    status = path.stat()
                    yield path.suffix == ".shard", status.st_mtime, status.st_size, path

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class _TooLarge(Exception):
    """A shard that does not fit under the cap."""


def _key(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:32]

"""Files that appear whole: what a reader, a second writer and a kill find."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import IO

import pytest

from tt_cli.atomic_write import PRIVATE, atomic_file, atomic_write, remove_abandoned


def test_nothing_is_seen_before_all_is_written_nor_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, "before")

    def stopped() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            assert path.read_text() == "before"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]


def test_a_private_file_is_its_owners_alone_while_it_is_written(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "key", mode=PRIVATE) as file:
        assert stat.S_IMODE(Path(file.name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_content_and_name_are_on_the_disk_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        content = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((content.name, content.read_text() if content.is_file() else sorted(os.listdir(content))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    atomic_write(tmp_path / "file", "whole")
    atomic_write(tmp_path / "file", "of no matter after a crash", durable=False)
    assert synced == [(".file.tmp", "whole"), (tmp_path.name, ["file"])]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_leaves_a_file_to_its_owner_in_a_folder_of_theirs_alone(tmp_path: Path) -> None:
    """Such as the authority's keys, which `rotate` replaces and the service's own user reads."""
    theirs, shared = tmp_path / "theirs", tmp_path / "shared"
    for folder in (theirs, shared):
        folder.mkdir()
        (folder / "file").touch()
        os.chown(folder / "file", 12345, 54321)
    os.chown(theirs, 12345, 54321)
    for folder in (theirs, shared):
        atomic_write(folder / "file", "new", mode=PRIVATE)
        atomic_write(folder / "other", "new")
    owners = [(path.stat().st_uid, path.stat().st_gid) for path in (theirs / "file", shared / "file")]
    assert owners == [(12345, 54321), (0, os.getegid())] and (theirs / "other").stat().st_uid == 0
    assert stat.S_IMODE((theirs / "file").stat().st_mode) == 0o600


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path: Path) -> None:
    left = tmp_path / ".file.tmp"
    left.write_text("half of it, and more than comes now")
    left.chmod(0o400)
    atomic_write(tmp_path / "file", "whole", mode=PRIVATE)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "whole"


def test_what_a_live_writer_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def of_nfs(file: IO[bytes], operation: int) -> None:
        if not file.writable() and operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    busy = tmp_path / ".file.tmp"
    with busy.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        remove_abandoned(busy)
        assert busy.exists()
    remove_abandoned(busy)
    assert not busy.exists()


@pytest.mark.parametrize("replace", [True, False])
def test_writers_come_one_after_the_other(tmp_path: Path, replace: bool) -> None:
    path, whole = tmp_path / "file", [str(number) * 100_000 for number in range(8)]

    def write(content: str) -> None:
        for _ in range(10):
            atomic_write(path, content, durable=False, replace=replace)

    writers = [threading.Thread(target=write, args=(content,)) for content in whole]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert seen <= set(whole) and (replace or len(seen) <= 1)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]

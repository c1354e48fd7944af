"""Shards on the disk: few bytes, the oldest leave first, whole and checked, by two processes at once."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from tt_cli.data.stream.shard_cache import Fetch, ShardCache
from tt_cli.data.stream.transfer import Received, ShardProblem


class Source:
    """Gives contents of a size, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def of(self, name: str, size: int = 1000, announce: bool = True) -> Fetch:
        def fetch(target: BinaryIO, announced: Callable[[int], None]) -> Received:
            self.asked.append(name)
            content = name.encode() * (size // len(name))
            if announce:
                announced(len(content))
            target.write(content)
            return Received(len(content), hashlib.sha256(content).hexdigest())

        return fetch


@pytest.fixture
def source() -> Source:
    return Source()


def said() -> tuple[list[str], Callable[[str], None]]:
    words: list[str] = []
    return words, words.append


def taken(cache: ShardCache) -> int:
    """Bytes that shards, and parts of some that are on their way, take now."""
    with cache._alone():  # or a shard that makes room is counted, and what takes its room too
        return sum(size for _, _, size, _ in cache._files())


def read(file: BinaryIO) -> bytes:
    with file:
        return file.read()


def test_a_shard_is_fetched_once(tmp_path: Path, source: Source) -> None:
    words, tell = said()
    cache = ShardCache(tmp_path / "shards", 10_000, tell)
    for _ in range(3):
        assert read(cache.bring("a", source.of("a"))) == b"a" * 1000
    assert read(ShardCache(tmp_path / "shards", 10_000, tell).bring("a", source.of("a"))) == b"a" * 1000
    assert source.asked == ["a"]
    assert words == []


@pytest.mark.parametrize("announce", [True, False])
def test_the_cap_holds_and_the_oldest_use_leaves_first(tmp_path: Path, source: Source, announce: bool) -> None:
    cache = ShardCache(tmp_path, 3000, said()[1])
    for number, name in enumerate("abc"):
        cache.bring(name, source.of(name, announce=announce)).close()
        os.utime(next(tmp_path.glob(f"{hashlib.sha256(name.encode()).hexdigest()[:32]}*")), (number, number))
    cache.bring("a", source.of("a")).close()
    opened = cache.bring("b", source.of("b"))
    os.utime(next(tmp_path.glob(f"{hashlib.sha256(b'b').hexdigest()[:32]}*")), (1, 1))
    cache.bring("d", source.of("d", announce=announce)).close()
    assert taken(cache) == 3000
    assert cache.find("b") is None
    assert read(opened) == b"b" * 1000, "who reads it goes on reading"
    assert all(cache.find(name) is not None for name in "acd")


def test_a_shard_that_is_larger_than_the_cap_is_read_all_the_same(tmp_path: Path, source: Source) -> None:
    words, tell = said()
    for cap in (0, 500):
        cache = ShardCache(tmp_path, cap, tell)
        assert read(cache.bring("a", source.of("a"))) == b"a" * 1000
        assert taken(cache) == 0
    assert words == []


def test_a_damaged_file_is_fetched_anew(tmp_path: Path, source: Source) -> None:
    cache = ShardCache(tmp_path, 10_000, said()[1])
    cache.bring("a", source.of("a")).close()
    kept = next(tmp_path.glob("*.shard"))
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert read(cache.bring("a", source.of("a"))) == b"a" * 1000
    assert source.asked == ["a", "a"]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fetch(target: BinaryIO, announced: Callable[[int], None]) -> Received:
        announced(1000)
        target.write(b"half")
        raise ShardProblem("the connection was cut")

    cache = ShardCache(tmp_path, 10_000, said()[1])
    with pytest.raises(ShardProblem):
        cache.bring("a", fetch)
    assert taken(cache) == 0


def test_what_a_killed_process_left_is_removed_whoever_has_its_number_now(tmp_path: Path, source: Source) -> None:
    def fetch(target: BinaryIO, announced: Callable[[int], None]) -> Received:
        announced(2500)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    cache = ShardCache(tmp_path, 3000, said()[1])
    process = multiprocessing.get_context("fork").Process(target=cache.bring, args=("b", fetch))
    process.start()
    process.join()
    (left,) = tmp_path.glob("*.part")
    left.rename(tmp_path / f"{left.stem}.{os.getpid()}.part")  # in a container the next process has its number
    cache.bring("a", source.of("a")).close()
    assert taken(cache) == 1000


def test_a_full_disk_is_said_once_and_shards_come_from_memory(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words, tell = said()
    cache = ShardCache(tmp_path, 10_000, tell)
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        for name in "abc":
            assert read(cache.bring(name, source.of(name))) == name.encode() * 1000
    assert len(words) == 1
    assert "No space left on device" in words[0]
    assert read(cache.bring("d", source.of("d"))) == b"d" * 1000
    assert cache.find("d") is not None, "there is room again"


def test_without_room_on_the_disk_or_in_memory_another_shard_is_taken(tmp_path: Path) -> None:
    refusals = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.ENOSPC, ""), MemoryError()])

    def fetch(target: BinaryIO, announced: Callable[[int], None]) -> Received:
        raise next(refusals)

    with pytest.raises(ShardProblem, match="there is no room for it, on the disk or in memory"):
        ShardCache(tmp_path, 10_000, said()[1]).bring("a", fetch)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, source: Source) -> None:
    (tmp_path / "file").write_text("")
    words, tell = said()
    assert read(ShardCache(tmp_path / "file" / "shards", 10_000, tell).bring("a", source.of("a"))) == b"a" * 1000
    assert "Not a directory" in words[0]


def test_shards_on_a_disk_that_can_only_be_read_are_read(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    words, tell = said()
    cache = ShardCache(tmp_path, 10_000, tell)
    cache.bring("a", source.of("a")).close()
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert [read(cache.bring(name, source.of(name)))[:1] for name in "aab"] == [b"a", b"a", b"b"]
    assert source.asked == ["a", "b"] and len(words) == 1 and "Read-only file system" in words[0]


def most_taken(folder: Path, stride: int) -> int:
    """In a process of its own: bring shards, and tell how many bytes lay there at most."""
    cache, most = ShardCache(folder, 5000, pytest.fail), 0  # each shard is kept
    for turn in range(150):
        name = "abcdefgh"[turn * stride % 8]
        assert read(cache.bring(name, Source().of(name))) == name.encode() * 1000
        most = max(most, taken(cache))
    return most


def test_two_processes_share_one_folder_under_one_cap(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert all(most <= 5000 for most in pool.map(most_taken, [tmp_path] * 2, (1, 3)))
    assert not list(tmp_path.glob("*.part"))

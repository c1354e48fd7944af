"""A bound on the memory that others' files take: a page of kilobytes can stand for gigabytes, and no reader asks."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

MOST = 1 << 30  # bytes
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # pyarrow's usual one reserves as much at once
Item = TypeVar("Item")

_lock = threading.Lock()
_bounds: list[int] = []  # of the threads that make an item now; the lowest one holds
_own = [0, 0]  # the process's limits without them


def bounded(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, while the process takes at most MOST bytes more, in making one, than it had before the first.

    Other threads are held to it meanwhile. Raises MemoryError, in words.
    """
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    iterator = iter(items)
    while True:
        with _held_to(taken + MOST):
            try:
                item = next(iterator)
            except StopIteration:
                return
            except MemoryError as error:  # which may name a size, or nothing
                raise MemoryError("it takes over a gigabyte of memory at once; make its parts smaller") from error
        yield item


@contextmanager
def _held_to(bound: int) -> Iterator[None]:
    with _lock:
        if not _bounds:
            _own[:] = resource.getrlimit(resource.RLIMIT_DATA)
        _bounds.append(bound)
        _limit()
    try:
        yield
    finally:
        with _lock:
            _bounds.remove(bound)
            _limit()


def _limit() -> None:
    soft, hard = _own
    known = [limit for limit in (soft, hard, *_bounds) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known, default=resource.RLIM_INFINITY), hard))

"""A bound on the memory that others' files take: a page of kilobytes can stand for gigabytes, and no reader asks."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

MOST = 1 << 30  # bytes
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # pyarrow's usual one reserves as much at once
Item = TypeVar("Item")


def bounded(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, while the process takes at most MOST bytes more, in making one, than it had before the first.

    Other threads are held to it meanwhile. Raises MemoryError, as which pyarrow's ArrowMemoryError counts too.
    """
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    iterator = iter(items)
    while True:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        known = [limit for limit in (soft, hard, taken + MOST) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        yield item

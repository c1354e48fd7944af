"""The bound on what others' files take: it holds while an item is made, in whichever threads, and no longer."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator

import pytest

from tt_cli.data.memory_bound import bounded


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_a_bound_ends_with_the_last_of_the_threads_that_it_is_for() -> None:
    """Each of two begins while the other is at work, and ends first once."""
    own, inside = limit(), list[int]()
    made = {name: (threading.Event(), threading.Event()) for name in "ab"}

    def items(name: str) -> Iterator[int]:
        begun, goes_on = made[name]
        begun.set()
        assert goes_on.wait(60.0)
        inside.append(limit())
        yield 1

    for first, last in ("ab", "ba"):
        threads = {}
        for name in "ab":
            threads[name] = threading.Thread(target=lambda name=name: list(bounded(items(name))))
            threads[name].start()
            assert made[name][0].wait(60.0)
        for name in (first, last):
            made[name][1].set()
            threads[name].join()
        for events in made.values():
            for event in events:
                event.clear()
        assert limit() == own
    assert len(inside) == 4 and all(0 < one < own or own < 0 < one for one in inside)


def test_who_fails_and_who_stops_midway_leave_none() -> None:
    own = limit()

    def failing() -> Iterator[int]:
        yield 1
        raise MemoryError

    rows = bounded(failing())
    assert next(rows) == 1 and limit() == own, "between two items there is none"
    with pytest.raises(MemoryError):
        next(rows)
    assert limit() == own

"""How much one peer may ask of this one: so many things a second, and so many at once.

What is counted by peer id is no bound on somebody who makes many ids; so each limit has one for all together too, and
what is remembered is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_PEERS = 4096  # remembered; who was not heard of for longest is forgotten


class Crowded(Exception):
    """It is too much now; the words are for the one who asks."""


class Rate:
    """A token bucket for each peer. per_second: tokens that come back. burst: tokens at most."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # with the time at which that was so

    def charge(self, peer_id: str, cost: float = 1.0) -> None:
        """Raises Crowded when this peer has used up what it may use, until some of it has come back.

        What is charged may exceed what is left: an answer's size is known when it is there.
        """
        now = self._clock()
        left, at = self._left.pop(peer_id, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        self._left[peer_id] = (left - cost if left > 0 else left), now
        while len(self._left) > MOST_PEERS:
            self._left.popitem(last=False)
        if left <= 0:
            raise Crowded("too much for now: ask again later")


class Places:
    """each: at once for one peer. total: for all together."""

    def __init__(self, each: int, total: int):
        self._each, self._total = each, total
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, peer_id: str) -> Iterator[None]:
        """A context that holds a place. Raises Crowded when there is none."""
        if self._taken[peer_id] >= self._each or self._taken.total() >= self._total:
            if not self._taken[peer_id]:
                del self._taken[peer_id]
            raise Crowded("too many at once: ask again later")
        self._taken[peer_id] += 1
        try:
            yield
        finally:
            self._taken[peer_id] -= 1
            if not self._taken[peer_id]:
                del self._taken[peer_id]

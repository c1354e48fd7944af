"""Rate limits: what one peer, user or address may ask of a service in a second, and how much at once.

What is counted by key is no bound on somebody who makes many keys; so `Places` has one for all together too, and what
is remembered is bounded.
"""

from __future__ import annotations

import ipaddress
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_KEYS = 20_000  # remembered; the one that was not heard of for longest is forgotten


class Crowded(Exception):
    """A request beyond the limits; the words are for the one who asks."""


class RateLimit:
    """A token bucket for each key: `burst` tokens at once, `per_second` in the long run. For any thread.

    most: keys that are remembered.
    """

    def __init__(
        self, burst: float, per_second: float, most: int = MOST_KEYS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_second, self._most, self._clock = burst, per_second, most, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key → tokens, and when that was so
        self._lock = threading.Lock()

    def wait(self, key: str, cost: float = 1.0) -> float:
        """0 when the key may ask now, which is charged; else the seconds until it may.

        The cost may exceed what is left, and is paid back before the next: an answer's size is known when it is there.
        """
        with self._lock:
            now = self._clock()
            tokens, before = self._left.pop(key, (self._burst, now))
            tokens = min(self._burst, tokens + (now - before) * self._per_second)
            granted = tokens >= 1
            self._left[key] = (tokens - cost if granted else tokens, now)
            while len(self._left) > self._most:
                self._left.popitem(last=False)
        if granted:
            return 0.0
        return (1 - tokens) / self._per_second if self._per_second else math.inf

    def charge(self, key: str, cost: float = 1.0) -> None:
        """As `wait`. Raises Crowded when the key may not ask now."""
        if self.wait(key, cost):
            raise Crowded("too much for now: ask again later")


class Places:
    """Requests under way. each: of one key at once. total: of all together."""

    def __init__(self, each: int, total: int):
        self._each, self._total = each, total
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one(self, key: str) -> Iterator[None]:
        """A context that holds a place. Raises Crowded when there is none."""
        if self._taken[key] >= self._each or self._taken.total() >= self._total:
            raise Crowded("too many at once: ask again later")
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            self._taken += Counter()  # forgets the keys without a place


def address_key(host: str | None) -> str:
    """The address as it is counted: one person may hold a whole /64 of IPv6."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)

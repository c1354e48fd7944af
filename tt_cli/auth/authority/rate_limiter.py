"""How often one address or one user may ask: token buckets in bounded memory."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable


class RateLimit:
    """At most `burst` at once and `per_second` in the long run, for each key.

    most: keys that are remembered; the one that has asked least recently is forgotten first.
    """

    def __init__(
        self, burst: int, per_second: float, most: int = 20_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_second, self._most, self._clock = burst, per_second, most, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key -> (tokens, when)
        self._lock = threading.Lock()

    def wait(self, key: str) -> float:
        """0 when the key may ask now, which counts; else the seconds until it may."""
        with self._lock:
            now = self._clock()
            tokens, before = self._left.pop(key, (float(self._burst), now))
            tokens = min(float(self._burst), tokens + (now - before) * self._per_second)
            granted = tokens >= 1
            self._left[key] = (tokens - 1 if granted else tokens, now)
            while len(self._left) > self._most:
                self._left.popitem(last=False)
            return 0.0 if granted else (1 - tokens) / self._per_second

    def __len__(self) -> int:
        return len(self._left)


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

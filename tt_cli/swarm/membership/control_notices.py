"""The organiser's notices on their way from peer to peer.

The authority may be out of reach for many peers, and for those whom a ban should keep out it is no harm if it is. So
every peer passes the newest notice that it knows on through the DHT, and every DHT node checks the authority's
signature. A higher number replaces a lower one, and nothing goes back.
"""

from __future__ import annotations

from typing import Any

from hivemind.dht import DHT
from hivemind.utils.timed_storage import ValueWithExpiration

from tt_cli.run import RunConfig
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.membership.admission import membership_at

EVERY_SECONDS, LIFE_SECONDS = 15.0, 600.0  # between two looks, four in a record's life at least; on the DHT


def notice_key(identity: str) -> str:
    """The DHT key of the organiser's notices: one subkey per number, and the signed text."""
    return f"{identity}_notice"


class ControlNotices:
    """Looks for notices now and then, and passes on. Does nothing in a run without an authority."""

    def __init__(self, run: RunConfig, dht: DHT, clock: Clock):
        self._clock = clock
        self._dht, self._key, self._longest = dht, notice_key(run.identity), run.swarm.statistics_expiration / 4
        self._membership, self._needed = membership_at(dht), run.membership.authority_key is not None
        self._looked = -float("inf")
        self._asked: Any = None

    def look(self) -> None:
        """Take up what the last look found, and begin another one if it is time. Does not wait."""
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            self._take(asked.result())
        every = min(EVERY_SECONDS, self._longest)
        if self._needed and self._asked is None and self._clock.monotonic() > self._looked + every:
            self._looked = self._clock.monotonic()
            self._asked = self._dht.get(self._key, latest=True, return_future=True)

    def _take(self, found: object) -> None:
        entries = found.value if isinstance(found, ValueWithExpiration) and isinstance(found.value, dict) else {}
        kept = [entry for entry in entries.values() if isinstance(entry, ValueWithExpiration)]
        for entry in kept:
            self._membership.hear(entry.value)
        newest, text = self._membership.notice(), self._membership.notice_text()
        until = self._clock.dht_time() + LIFE_SECONDS
        lasts = max((entry.expiration_time for entry in kept if entry.value == text), default=0.0)
        if newest is not None and lasts < until - LIFE_SECONDS / 2:  # who looks first passes it on again
            self._dht.store(self._key, subkey=newest.number, value=text, expiration_time=until, return_future=True)

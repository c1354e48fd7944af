"""Leadership among the auxiliary peers of a run: what should happen once, such as publishing, the leader does.

Each that could lead says so in its signed record on the DHT, and since when it does. The record is the lease: it is
renewed every few seconds, and does not count any more when it is older than `LEASE_SECONDS`. Nobody else leads as long
as a lease is seen; then whoever has the smallest peer id takes it. Two that took it at once, or apart, see each
other's: the older lease stays. Where the run file names its auxiliary peers (`peers.initial`), only they can lead.

The lease saves work and traffic; nothing relies on there being one leader. A part that cannot know, or sees that the
leader does not do its work, does it itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from tt_cli.atomic_write import atomic_write

LEASE_SECONDS = 30.0
FIRST_SHARE = 1 / 3  # of that, who has just come up looks before it leads: it may not see all others yet
STALE_SECONDS = 30.0  # after which the file says nothing: its writer ended
WRITTEN_SECONDS = 5.0


class Lease:
    """This auxiliary peer's side. me: its peer id. named: peer ids of those who can lead; empty: all.

    lasts: seconds that a lease counts without being renewed. since: Unix time since when this peer leads, 0 while it
    does not. holder: the peer id of who leads, "" for nobody. For the coordinator's loop.
    """

    def __init__(self, me: str, named: Collection[str], lasts: float = LEASE_SECONDS):
        self._me, self.lasts = me, lasts
        self._named = frozenset(named)
        self.since = 0.0
        self.holder = ""
        self._began_at: float | None = None

    @property
    def candidate(self) -> bool:
        """True for a peer that could lead."""
        return not self._named or self._me in self._named

    def look(self, claims: Mapping[str, float | None], now: float) -> None:
        """Follow what others say in records that count. claims: peer id → since when it leads, None: it never will.

        now: Unix time.
        """
        self._began_at = now if self._began_at is None else self._began_at
        others = {
            peer: since
            for peer, since in claims.items()
            if since is not None and peer != self._me and (not self._named or peer in self._named)
        }
        leading = [(min(since, now), peer) for peer, since in others.items() if since > 0.0]
        if self.since:
            leading.append((self.since, self._me))
        looked = now - self._began_at >= self.lasts * FIRST_SHARE
        if not leading and looked and self.candidate and self._me == min([self._me, *others]):
            leading = [(now, self._me)]
        since, self.holder = min(leading, default=(0.0, ""))
        self.since = since if self.holder == self._me else 0.0


class LeaseFile:
    """For the other parts on this machine: whether this auxiliary peer leads. Written by the coordinator."""

    def __init__(self, folder: Path):
        self.path = folder / "lease"
        self._written: tuple[str, float] = "", -float("inf")

    def write(self, holder: str, mine: bool) -> None:
        """At once when it is new, else now and then. Where that does not work the parts do their work themselves."""
        if holder != self._written[0] or time.monotonic() >= self._written[1] + WRITTEN_SECONDS:
            self._written = holder, time.monotonic()
            with contextlib.suppress(OSError):
                atomic_write(self.path, json.dumps({"holder": holder, "mine": mine}), durable=False)

    def other(self) -> str:
        """The peer id of another auxiliary peer that leads; "" where this one does, or nobody knows."""
        try:
            age = time.time() - self.path.stat().st_mtime
            lease = json.loads(self.path.read_text(encoding="utf-8"))
            holder, mine = str(lease["holder"])[:128], bool(lease["mine"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return "" if mine or not 0 <= age < STALE_SECONDS else holder

"""No-shows: exponential backoff for peers that say they would come to a round, and do not.

Who stayed away is not expected before it renews its record, and from its second time on not in the next round, the next
three, the next seven either. With its first round that is forgotten. Nobody is kept out: who comes is in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from tt_cli.swarm.records.peer_record import PeerRecord

MOST_ROUNDS = 63  # that one is not expected in


class NoShows:
    """The backoff of all peers. For one thread."""

    def __init__(self) -> None:
        self._absent: dict[str, float] = {}  # peer id → time of its record when it did not come
        self._strikes: Counter[str] = Counter()
        self._rounds_off: dict[str, int] = {}

    def expects(self, record: PeerRecord) -> bool:
        """True if the next round should wait for this peer."""
        return record.peer_id not in self._rounds_off and record.time > self._absent.get(record.peer_id, -1.0)

    def ended(self, missed: Collection[str], came: Iterable[str], records: Iterable[PeerRecord]) -> None:
        """A round ended, well or not. missed: who should have come."""
        self._rounds_off = {peer: rounds - 1 for peer, rounds in self._rounds_off.items() if rounds > 1}
        self._absent = {record.peer_id: record.time for record in records if record.peer_id in missed}
        for peer_id in came:
            self._strikes.pop(peer_id, None)
            self._rounds_off.pop(peer_id, None)
        self.strike(missed)

    def forgive(self) -> None:
        """Expect everybody again: there are too few for a round without them."""
        self._absent, self._rounds_off = {}, {}

    def strike(self, peer_ids: Iterable[str]) -> None:
        """The others waited for these in vain."""
        for peer_id in peer_ids:
            self._strikes[peer_id] += 1
            if rounds := min(MOST_ROUNDS, 2 ** (self._strikes[peer_id] - 1) - 1):
                self._rounds_off[peer_id] = rounds

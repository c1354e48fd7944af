"""Claim limits: what a peer's own account of its work may count for.

Rounds begin when the samples of all trainers are enough, so one who claims many begins them early for all. Nobody
can see what another computes; what can be seen is time and the other peers. Of a peer's samples no more count than it
can have computed since it was first seen at its step, at up to `FASTER` times the speed of the trainer in the middle.
And who did not come to a round to which its samples led is not counted again until it comes to one, but by those who
compute nothing themselves: they lose nothing, and if all who compute owed them a round they would wait for ever.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable

from tt_cli.swarm.records.consensus import FASTER, speeds
from tt_cli.swarm.records.peer_record import PeerRecord

SPARE, SPARE_SECONDS = 1.5, 1.0  # speeds are means over half a minute, and records are read a little late

BEYOND_ALL = 1e6  # target batches: more than anybody computes in a second, or towards a step in a run's whole life

State = tuple[int, str]


def boasting(records: Iterable[PeerRecord], target_batch_size: int) -> frozenset[str]:
    """Peer ids of those that claim work that nobody can have done. It counts as `ClaimLimits.bounded` lets it."""
    most = BEYOND_ALL * target_batch_size
    return frozenset(one.peer_id for one in records if max(one.samples, one.samples_per_second) > most)


class ClaimLimits:
    """Remembers since when each peer is at its step, and who owes a round. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # peer id → its state, and when it was first seen there; None before the first look
        self._since: dict[str, tuple[State, float]] | None = None
        self._counted: frozenset[str] = frozenset()  # whose samples counted towards this peer's next step
        self._owing: frozenset[str] = frozenset()
        self.most = self.speed = math.inf  # that others believe of this peer: of steps made without it it has more

    def bounded(self, records: Iterable[PeerRecord], own: str) -> list[PeerRecord]:
        """The records, with the samples and speeds that may be believed. own: whose record is taken as it is."""
        now, records = self._clock(), list(records)
        trainers = [record for record in records if record.averages]
        sizes = [record.micro_batch for record in trainers if record.micro_batch]
        burst = FASTER * statistics.median_low(sizes) if sizes else FASTER
        mine = next((record for record in trainers if record.peer_id == own), None)
        owing = self._owing if mine is not None and mine.samples_per_second else frozenset()
        since, believed = {}, {}
        for record, speed in zip(trainers, speeds(trainers), strict=True):
            state = record.state
            # whom this peer finds there with its first look may have begun long ago
            before = (state, -math.inf) if self._since is None else self._since.get(record.peer_id, (state, now))
            since[record.peer_id] = before if before[0] == state else (state, now)
            seconds = now - since[record.peer_id][1] + SPARE_SECONDS
            most = burst + SPARE * speed * seconds if math.isfinite(seconds) else math.inf
            if record.peer_id == own:
                self.most, self.speed = most, speed
                continue
            samples = 0 if record.peer_id in owing else min(record.samples, most)
            believed[record.peer_id] = record.changed(samples=int(samples), samples_per_second=speed)
        self._since = since
        here = mine.state if mine is not None else None
        self._counted = frozenset(r.peer_id for r in believed.values() if r.samples and r.state == here)
        self._owing &= since.keys()
        return [believed.get(record.peer_id, record) for record in records]

    def met(self, members: Iterable[str]) -> None:
        """These came to a round of this peer's."""
        self._owing = (self._owing | self._counted) - set(members)

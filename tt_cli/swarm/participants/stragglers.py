"""Straggler detection: leave out a peer whose delay costs the swarm more than its samples contribute.

Every member measures by its own clock how much later each of the others ended what it did in a round than most did.
Without a member that computes the share s of the samples a step would take 1 / (1 - s) times as long as it does now
less the time for which this member holds it up. Where that is shorter by a tenth, in most of the last steps and in all
of them together, the swarm learns more without it. A member says so in its record, for some steps, and for twice as
many each time again; who is named by more than half is left out. Unlike measurements so never part the members. Only
time counts in which the samples of the next step lay ready: the rest is free (delayed updates).

A member that is late for all others may have waited for one that is slow with it alone, and says so; or it lies. So
only one of them is charged: the one that has trouble with more others; between two that have it with each other alone
it takes turns, whoever is named first. Neither a slow member nor one that blames others costs the swarm much more than
itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

WINDOW, OFTEN = 5, 3  # steps with a member that are looked at; from how many on it is judged, the first time
GAIN = 0.9  # of the time that a step takes with it: not more may be needed without it
BLAMELESS = 0.25  # of `next_chunk_timeout`: so long a member may hold a step up
LARGEST_SHARE = 0.5  # of the samples that a member may have by its own word
FIRST_STEPS, MOST_STEPS = 10, 640  # that one is left out
REMEMBERED = 2 * MOST_STEPS  # steps for which it counts whom a late member named


@dataclass(frozen=True)
class Straggler:
    """The reason to leave one out: seconds that it cost of a whole step, its share of the samples; for how long."""

    cost: float
    whole: float
    share: float
    steps: int


class StragglerDetector:
    """Costs and samples of each member. least: seconds of a step that nobody is blamed for. For one thread."""

    def __init__(self, least: float):
        self._least = least
        self._now: dict[str, float] = defaultdict(float)  # member → seconds that it cost in this step so far
        self._seen: dict[str, deque[tuple[int, float, float, float]]] = {}  # member → epoch, cost, whole, share
        self._left_out: dict[str, tuple[int, int]] = {}  # member → for how many steps the last time, until which one
        self._named: dict[tuple[str, str], int] = {}  # who was late, for whom it waited as it says → the last step
        self._epoch = 0

    def round_ended(
        self,
        late: Mapping[str, float],
        waited: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
        spoilers: Collection[str] = (),
        seconds: float = 0.0,
    ) -> None:
        """late, waited: see `RoundResult`. spoilers: because of whom all `seconds` were lost."""
        charged = self._charged(late, waited)
        for member in charged.keys() | set(spoilers):
            self._now[member] += max(charged.get(member, 0.0), seconds if member in spoilers else 0.0)

    def _charged(self, late: Mapping[str, float], waited: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Member → seconds, with what a late member waited for another charged to either of the two."""
        charged = defaultdict(float, late)
        for member, waits in waited.items():
            for other, seconds in waits.items():
                beyond = seconds - late.get(other, 0.0)  # what others see themselves
                explained = min(late.get(member, 0.0), beyond)
                if other != member and explained > self._least:
                    self._named[member, other] = self._epoch
                    if self._believed(member, other):
                        charged[member] -= explained
                        charged[other] = max(charged[other], explained)
                    break  # the longest wait explains it
        return charged

    def _believed(self, member: str, other: str) -> bool:
        """True if the second of the two is charged, of whom the first says that it waited for it."""
        named = sum(late == member for late, _ in self._named)
        naming = sum(waited_for == other for _, waited_for in self._named)
        return naming > named or (naming == named and self._times(other) <= self._times(member))

    def _times(self, member: str) -> int:
        """The count of times that it was left out, each time for twice as long."""
        return (self._left_out.get(member, (0, 0))[0] // FIRST_STEPS).bit_length()

    def stepped(self, epoch: int, whole: float, idle: float, samples: Mapping[str, int]) -> dict[str, Straggler]:
        """The step `epoch` was made: who should be left out from now on.

        whole: seconds since the step before. idle: for how many of them the samples lay ready. samples: member → how
        many it gave.
        """
        self._epoch = epoch
        self._seen = {member: seen for member, seen in self._seen.items() if seen[-1][0] >= epoch - WINDOW}
        self._named = {pair: at for pair, at in self._named.items() if at >= epoch - REMEMBERED}
        # who came back and has been no burden for as long as it was left out begins anew
        self._left_out = {
            member: (steps, until) for member, (steps, until) in self._left_out.items() if epoch <= until + steps
        }
        total, now, stragglers = sum(samples.values()), self._now, dict[str, Straggler]()
        self._now = defaultdict(float)
        for member in samples.keys() | now.keys():
            share = min(LARGEST_SHARE, samples.get(member, 0) / total if total else 0.0)
            seen = self._seen.setdefault(member, deque(maxlen=WINDOW))
            seen.append((epoch, min(now.get(member, 0.0), idle), whole, share))
            _, cost, usual, given = (sum(column) / len(seen) for column in zip(*seen, strict=True))
            heavy = sum(self._too_much(*step) for _, *step in seen)  # not by one round that failed
            often = (len(seen) >= OFTEN or member in self._left_out) and 2 * heavy > len(seen)
            if often and self._too_much(cost, usual, given):
                steps, until = self._left_out.get(member, (FIRST_STEPS, epoch))
                if epoch > until:  # it came back; else most do not say so yet
                    steps = min(MOST_STEPS, 2 * steps)
                stragglers[member] = Straggler(cost, usual, given, steps)
                self._left_out[member] = steps, epoch + steps
                del self._seen[member]
        return stragglers

    def _too_much(self, cost: float, whole: float, share: float) -> bool:
        return cost > self._least and (whole - cost) / (1.0 - share) < GAIN * whole

"""Audit sampling: the part of an average that a member computes again after a round.

By chance; and, with audits saved up for that, one that looks wrong: an average has this peer's own gradient in it, so a
part that is much less like it than the others is looked at first. Looks prove nothing: the audit does.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Sequence

import torch
from hivemind.p2p import PeerID

from tt_cli.swarm.allreduce.allreduce import AllReduce

SHARE = 0.05  # of the bytes of a round that audits by chance may cost on average,
LEAST = 0.25  # but an audit every so many rounds there is at least
SAVED = 3.0  # audits for what looks wrong, at most; half of a round's chance is earned with every round
MOST_COMPARED = 16  # parts: two of them are decoded for each
FEWEST_COMPARED = 3
LEAST_ELEMENTS = 1024  # of a part that is compared
SYSTEM = random.SystemRandom()
CLEAR = 6.0  # times what chance alone makes of a likeness

Place = tuple[PeerID, int]
"""A reducer, and the place of a part among those of the reducer."""


class AuditSampler:
    """Picks parts in the rounds of one peer, one after the other."""

    def __init__(self, entropy: random.Random = SYSTEM):
        self._saved, self._entropy = SAVED, entropy

    def pick(self, allreduce: AllReduce, silent: Collection[PeerID] = ()) -> Place | None:
        """A part of a round whose average has just come whole; None: not this time.

        silent: who left audits of this round unanswered. That cost nothing, so what else looks wrong has its turn.
        """
        asked = {allreduce.me, *silent}
        others = [reducer for reducer in allreduce.reducers if reducer not in asked and allreduce.parts_of(reducer)]
        if not others:
            return None
        chance = 0.0 if silent else _chance(allreduce)
        self._saved = min(SAVED, self._saved + (1.0 if silent else chance / 2))
        if self._saved >= 1.0 and (doubtful := unlike(allreduce, others, self._entropy)):
            self._saved -= 1.0
            return self._entropy.choice(doubtful)
        if self._entropy.random() >= chance:
            return None
        places = [(reducer, place) for reducer in others for place in range(len(allreduce.parts_of(reducer)))]
        return self._entropy.choice(places)


def _chance(allreduce: AllReduce) -> float:
    """An audit moves one part of each member, a round all parts both ways."""
    return max(LEAST, SHARE * 2 * len(allreduce.parts) / len(allreduce.members))


def unlike(allreduce: AllReduce, others: Sequence[PeerID], entropy: random.Random = SYSTEM) -> list[Place]:
    """Suspicious parts: of one of each reducer, those less than half as like this peer's gradient as the middle one."""
    if allreduce.weight <= 0.0:
        return []
    compared: dict[Place, int] = {}
    for reducer in entropy.sample(others, min(len(others), MOST_COMPARED)):
        indexes = allreduce.parts_of(reducer)
        place = entropy.randrange(len(indexes))
        if allreduce.parts[indexes[place]].elements >= LEAST_ELEMENTS:
            compared[reducer, place] = indexes[place]
    if len(compared) < FEWEST_COMPARED:
        return []
    likeness = {place: _likeness(allreduce, index) for place, index in compared.items()}
    middle = statistics.median(likeness.values())
    smallest = min(allreduce.parts[index].elements for index in compared.values())
    if middle < CLEAR / math.sqrt(smallest):  # this peer's own gradient cannot be made out
        return []
    return [place for place, cosine in likeness.items() if cosine < middle / 2]


def _likeness(allreduce: AllReduce, index: int) -> float:
    """The cosine between a part of the average and of this peer's gradient; 0 where one of them is nothing."""
    part = allreduce.parts[index]
    average, own = torch.empty(part.elements), torch.empty(part.elements)
    allreduce.store.codec.of(part.large).decode_into(allreduce.store.get(index), average)
    allreduce.codec.of(part.large).decode_into(allreduce.encoded(index), own)
    norms = float(average.norm()) * float(own.norm())
    return float(average @ own) / norms if norms > 0.0 else 0.0

"""Shares of the gradients for the reducers of a round: those with which the slowest of them is done soonest.

Of n members one with the share s sends (1 - s) of its gradient to other reducers and s of the average to n - 1 members:
1 + (n - 2) s of a whole one, and takes as much. On a line that carries b gradients in a second that lasts
(1 + (n - 2) s) / b seconds. hivemind's linear programme makes the longest of these times as short as it can be; where
all shares are at least 0 the solution is to fill up to one time (water-filling), so that a line on which its own
gradient alone takes longer reduces nothing. Here integers are filled, which all members do alike.

What a line carries nobody can check at once, so no reducer has more than half: who claims more than it has is slow, and
the stragglers' detector sees to it; who averages wrongly is found by its parts, the sooner the more it has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import gcd

WHOLE, MOST = 2**20, 2**19  # of the gradients, and the largest share of them
FASTEST = 10**7  # kbit/s that count
FINE = 2**12  # how finely time is divided
ALIKE = 0.8  # of the next faster line: measurements differ by as much


def counted_uploads(claimed: Sequence[int]) -> list[int]:
    """The uploads (kbit/s) that count: alike where they nearly are; of who knows none yet (0) the slowest one's."""
    level, counted = 0, dict[int, int]()
    for upload in sorted((min(upload, FASTEST) for upload in claimed if upload > 0), reverse=True):
        level = upload if upload < ALIKE * level or not level else level
        counted[upload] = level
    return [counted.get(min(upload, FASTEST), level or 1) for upload in claimed]


def shares_of(claimed: Sequence[int], members: int) -> tuple[int, ...]:
    """The shares of reducers with these uploads (kbit/s, 0 where it is not known) in a group of so many members.

    As integers of which each is its part of their sum. Those of who is too slow to reduce are 0.
    """
    uploads = counted_uploads(claimed)
    if len({*uploads}) == 1 or members < 3 or len(uploads) < 3:
        return (1,) * len(uploads)

    def filled(time: int) -> list[int]:
        """The most that each can reduce in this time; a line of 1 kbit/s carries a gradient in WHOLE * FINE of it."""
        return [min(MOST, max(0, (time * upload // FINE - WHOLE) // (members - 2))) for upload in uploads]

    times = range(members * WHOLE * FINE)  # in the last of them any two have reduced everything
    shares = filled(bisect_left(times, WHOLE, key=lambda time: sum(filled(time))))
    return tuple(share // gcd(*shares) for share in shares)

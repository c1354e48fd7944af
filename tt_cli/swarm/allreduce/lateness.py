"""Waits of one round, as its members measure and report them: how much later one ended than most others."""

from __future__ import annotations

import math
from collections.abc import Mapping

REPORTED = 3  # members that one may report it waited for


def beyond_most(ended: Mapping[str, float]) -> dict[str, float]:
    """Member → seconds by which it ended later than half of the others did. ended: member → when, in seconds."""
    late = {}
    for member, end in ended.items():
        others = sorted(other_end for other, other_end in ended.items() if other != member)
        if others and end > others[(len(others) - 1) // 2]:
            late[member] = end - others[(len(others) - 1) // 2]
    return late


def longer_of(waits: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Member → the longer one of two waits for it."""
    return {member: max(waits.get(member, 0.0), others.get(member, 0.0)) for member in {**waits, **others}}


def waits_to_report(mine: Mapping[str, float]) -> dict[str, float]:
    """The longest waits, for the others."""
    longest = sorted(mine.items(), key=lambda item: -item[1])[:REPORTED]
    return {member: round(seconds, 1) for member, seconds in longest if seconds >= 1.0}


def read_waits(said: object) -> dict[str, float]:
    """The waits that another member reports, the longest first; none where it reports nonsense."""
    if not isinstance(said, dict) or len(said) > REPORTED:
        return {}
    numbers = {member: s for member, s in said.items() if isinstance(member, str) and isinstance(s, (int, float))}
    finite = [(member, float(s)) for member, s in numbers.items() if 0 <= s < math.inf]
    return dict(sorted(finite, key=lambda item: -item[1]))

"""Waits of one round, as its members measure and report them: how much later one ended than most others."""

from __future__ import annotations

import math
from collections.abc import Mapping

TOLD = 3  # members that one may say it waited for


def beyond_most(ended: Mapping[str, float]) -> dict[str, float]:
    """Member → seconds by which it ended later than half of the others did. ended: member → when, in seconds."""
    late = {}
    for one, at in ended.items():
        others = sorted(each for other, each in ended.items() if other != one)
        if others and at > others[(len(others) - 1) // 2]:
            late[one] = at - others[(len(others) - 1) // 2]
    return late


def waits_to_tell(mine: Mapping[str, float]) -> dict[str, float]:
    """The longest of them, for the others."""
    longest = sorted(mine.items(), key=lambda item: -item[1])[:TOLD]
    return {one: round(seconds, 1) for one, seconds in longest if seconds >= 1.0}


def read_waits(said: object) -> dict[str, float]:
    """What another member says that it waited for, the longest first; nothing where it says nonsense."""
    if not isinstance(said, dict) or len(said) > TOLD:
        return {}
    numbers = {one: s for one, s in said.items() if isinstance(one, str) and isinstance(s, (int, float))}
    return dict(sorted(((one, float(s)) for one, s in numbers.items() if 0 <= s < math.inf), key=lambda item: -item[1]))

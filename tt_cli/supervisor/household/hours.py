"""Hours of the week in which a peer may work: "23:00-07:00", "mon-fri 22:00-06:00,sat-sun".

Times are local. Each range is turned into moments in time, day by day, so that summer time neither repeats nor splits
it: a range ends at the first time that the clock shows its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_RANGE = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))?)?\s*(?:(\d{1,2}:\d\d)\s*-\s*(\d{1,2}:\d\d))?")
MEANT = "such as 23:00-07:00 or mon-fri 22:00-06:00,sat-sun"
WHOLE_DAY = 24 * 60


@dataclass(frozen=True)
class Range:
    """On these weekdays (0: Monday), from the minute `start` of the day to `end`, which may be on the next day."""

    days: frozenset[int]
    start: int
    end: int


@dataclass(frozen=True)
class Hours:
    """Ranges of the week. text: as the person wrote them."""

    text: str
    ranges: tuple[Range, ...]

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Ranges with commas between them: weekdays, a time range, or both. Without weekdays: every day.

        A range that goes past midnight belongs to the day on which it begins. Raises ValueError.
        """
        return cls(text, tuple(_range(part.strip().lower()) for part in text.split(",")))

    def allow(self, now: float) -> bool:
        """True when the moment `now` (Unix time) lies in one of the ranges."""
        return any(start <= now < end for start, end in self._stretches(now))

    def changes_at(self, now: float) -> float | None:
        """The next moment at which `allow` gives another answer; None when there is none within a week."""
        allowed = self.allow(now)
        edges = sorted(edge for stretch in self._stretches(now) for edge in stretch if edge > now)
        return next((edge for edge in edges if self.allow(edge) != allowed), None)

    def _stretches(self, now: float) -> Iterator[tuple[float, float]]:
        """All ranges from yesterday to a week from now, as moments."""
        today = datetime.fromtimestamp(now).date()
        for days in range(-2, 9):
            day = today + timedelta(days=days)
            for hours in self.ranges:
                if day.weekday() in hours.days:
                    yield _moment(day, hours.start), _moment(day, hours.end)


def _moment(day: date, minute: int) -> float:
    return (datetime.combine(day, time.min) + timedelta(minutes=minute)).timestamp()


def _range(part: str) -> Range:
    match = _RANGE.fullmatch(part)
    if not part or match is None:
        raise ValueError(f"'{part}' is no range of hours; give one {MEANT}")
    first, last, start, end = match.groups()
    for day in (first, last):
        if day is not None and day not in DAYS:
            raise ValueError(f"'{day}' is no weekday; there are {', '.join(DAYS)}")
    days = frozenset(range(7))
    if first is not None:
        begin, length = DAYS.index(first), (DAYS.index(last or first) - DAYS.index(first)) % 7
        days = frozenset((begin + i) % 7 for i in range(length + 1))
    if start is None:
        return Range(days, 0, WHOLE_DAY)
    begin, stop = _minute(start), _minute(end)
    if begin == stop:
        raise ValueError(f"'{part}' begins and ends at the same time")
    return Range(days, begin, stop if stop > begin else stop + WHOLE_DAY)


def _minute(text: str) -> int:
    hour, minute = map(int, text.split(":"))
    if minute > 59 or hour * 60 + minute > WHOLE_DAY:
        raise ValueError(f"'{text}' is no time of day; the last one is 24:00")
    return hour * 60 + minute

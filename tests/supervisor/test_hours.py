"""Hours of the week: what is allowed when, midnight, weekdays, summer time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from tt_cli.supervisor.household.hours import Hours
from tt_cli.supervisor.household.limits import HoursLimit, Origin

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(words: str, fold: int = 0) -> float:
    """Unix time of a local time; 5 January 2026 is a Monday."""
    return datetime.fromisoformat(words).replace(tzinfo=BERLIN, fold=fold).timestamp()


@pytest.mark.parametrize(
    ("hours", "moment", "allowed", "changes"),
    [
        ("09:00-17:00", "2026-01-05 08:59:59", False, "2026-01-05 09:00"),
        ("09:00-17:00", "2026-01-05 09:00", True, "2026-01-05 17:00"),
        ("09:00-17:00", "2026-01-05 17:00", False, "2026-01-06 09:00"),
        ("23:00-07:00", "2026-01-05 22:00", False, "2026-01-05 23:00"),
        ("23:00-07:00", "2026-01-05 23:30", True, "2026-01-06 07:00"),
        ("23:00-07:00", "2026-01-05 03:00", True, "2026-01-05 07:00"),
        ("0:00-7:30,22:00-24:00", "2026-01-05 23:00", True, "2026-01-06 07:30"),
        ("mon-fri 22:00-06:00,sat-sun", "2026-01-09 23:00", True, "2026-01-12 00:00"),
        ("mon-fri 22:00-06:00,sat-sun", "2026-01-10 12:00", True, "2026-01-12 00:00"),
        ("mon-fri 22:00-06:00,sat-sun", "2026-01-12 05:00", False, "2026-01-12 22:00"),
        ("fri 22:00-06:00", "2026-01-10 05:59", True, "2026-01-10 06:00"),
        ("fri 22:00-06:00", "2026-01-09 05:59", False, "2026-01-09 22:00"),
        ("sat-mon", "2026-01-05 12:00", True, "2026-01-06 00:00"),
        ("SUN", "2026-01-05 12:00", False, "2026-01-11 00:00"),
        (" Tue 10:00 - 11:00 ", "2026-01-06 10:30", True, "2026-01-06 11:00"),
    ],
)
def test_what_is_allowed_and_until_when(hours: str, moment: str, allowed: bool, changes: str) -> None:
    one = Hours.parse(hours)
    assert one.allow(at(moment)) is allowed
    assert one.changes_at(at(moment)) == at(changes)


def test_a_whole_week_never_changes() -> None:
    whole = Hours.parse("mon-sun")
    assert whole.allow(at("2026-01-05 12:00"))
    assert whole.changes_at(at("2026-01-05 12:00")) is None


def test_a_night_in_which_the_clock_goes_forward_is_an_hour_shorter() -> None:
    night = Hours.parse("23:00-07:00")
    before = at("2026-03-28 23:00")
    assert night.changes_at(before) == at("2026-03-29 07:00") == before + 7 * 3600


def test_a_time_that_the_clock_leaves_out_comes_an_hour_later() -> None:
    morning = Hours.parse("02:30-05:00")
    assert not morning.allow(at("2026-03-29 01:59"))
    assert morning.changes_at(at("2026-03-29 01:59")) == at("2026-03-29 03:30")


def test_an_hour_that_comes_twice_is_neither_split_nor_repeated() -> None:
    night = Hours.parse("23:00-02:30")
    assert night.changes_at(at("2026-10-24 23:00")) == at("2026-10-25 02:30", fold=0)
    assert not night.allow(at("2026-10-25 02:10", fold=1))
    whole = Hours.parse("23:00-07:00")
    assert all(whole.allow(at("2026-10-24 23:00") + 600 * i) for i in range(54))
    assert whole.changes_at(at("2026-10-24 23:00")) == at("2026-10-24 23:00") + 9 * 3600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no range of hours; give one such as 23:00-07:00"),
        ("at night", "'at night' is no range of hours"),
        ("23-7", "'23-7' is no range of hours"),
        ("23:00-07:00,", "'' is no range of hours"),
        ("25:00-26:00", "'25:00' is no time of day"),
        ("10:60-11:00", "'10:60' is no time of day"),
        ("24:01-05:00", "'24:01' is no time of day"),
        ("08:00-08:00", "begins and ends at the same time"),
        ("xyz", "'xyz' is no weekday; there are mon, tue"),
        ("mon-xyz 10:00-11:00", "'xyz' is no weekday"),
    ],
)
def test_wrong_words_are_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        Hours.parse(text)
    assert said in str(caught.value)


def test_another_time_zone_counts_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a laptop that travels, or a server whose zone was wrong; the C library looks only when it is asked to."""
    limit, now = HoursLimit(Hours.parse("09:00-17:00"), Origin("hours", "", "--hours")), at("2026-01-05 08:00")
    assert limit.look(now).action == "pause"
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert limit.look(now).action == "go on"

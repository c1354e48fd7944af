"""The pieces of the screens: exact words, and nothing wider than asked."""

from __future__ import annotations

import math

import pytest

from tt_cli.terminal.format import bar, byte_count, clean, duration, loss_value, rate, short_id


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90_000, "1 d 1 h"),
        (-5, "0 s"),
        (None, "–"),
        (math.inf, "–"),
        (math.nan, "–"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_600, "1.0 MB"),
        (12_340_000, "12.3 MB"),
        (5e9, "5.0 GB"),
        (2.5e12, "2.5 TB"),
        (4e15, "4,000.0 TB"),
    ],
)
def test_bytes(count: float, words: str) -> None:
    assert byte_count(count) == words


def test_rates_and_losses() -> None:
    assert [rate(x) for x in (0.349, 9.99, 12.14, 99.96, 1204)] == ["0.35", "9.99", "12.1", "100", "1,204"]
    assert [loss_value(x) for x in (3.14159, 1e6, None, math.nan)] == ["3.142", "1e+06", "–", "–"]


def test_nothing_from_the_network_moves_the_cursor() -> None:
    assert clean("a\x1b[2Jb\x9b1mc\r\nd\u202ee") == "a?[2Jb?1mc d?e"
    assert short_id("\x1b" * 3) == "???"
    assert short_id("QmWjTgY4Hjbz8pQ4kYNa2r1C") == "…Na2r1C"


@pytest.mark.parametrize("fraction", [0.0, 0.26, 0.5, 1.0, 1.7, -1.0, math.nan])
def test_a_bar_is_as_wide_as_asked(fraction: float) -> None:
    assert bar(fraction, 13).cell_len == 13


def test_a_bar_shows_its_fraction() -> None:
    assert bar(0.5, 4).plain == "━━──"
    assert bar(0.625, 4).plain == "━━╸─"

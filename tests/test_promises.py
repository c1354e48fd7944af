"""Every test of real processes says what it promises, each its own; the table of tests/README.md is current."""

from __future__ import annotations

from collections import Counter

from promises import README, TESTS, readme, shown


def test_every_test_of_real_processes_has_a_promise_of_its_own() -> None:
    told = list(shown())
    assert not [one.test for one in told if not one.promise]
    assert not [promise for promise, count in Counter(one.promise for one in told).items() if count > 1]
    assert all((TESTS / one.also.removeprefix("tests/")).is_file() for one in told if one.also)


def test_the_table_is_current() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run `python tests/promises.py` and commit"

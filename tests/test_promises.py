"""Every test of real processes says what it promises, each its own; the table of tests/README.md is current.

And what the documentation names among the tests is there.
"""

from __future__ import annotations

import re
from collections import Counter

from promises import README, TESTS, readme, shown


def test_every_test_of_real_processes_has_a_promise_of_its_own() -> None:
    told = list(shown())
    assert not [one.test for one in told if not one.promise]
    assert not [promise for promise, count in Counter(one.promise for one in told).items() if count > 1]
    assert all((TESTS / one.also.removeprefix("tests/")).is_file() for one in told if one.also)


def test_the_table_is_current() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run `python tests/promises.py` and commit"


def test_the_tests_that_the_documentation_names_are_there() -> None:
    written = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    for page in (TESTS.parent / "docs").rglob("*.md"):
        for file, name in re.findall(r"`(?:[\w/]*/)?(test_\w+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
            texts = [text for path, text in written.items() if path.name == file]
            assert any(f"def {name}" in text for text in texts) if name else texts, f"{page.name}: {file}::{name}"

"""What people are promised, and which test of real processes shows it: writes the table of tests/README.md.

Each such test says it in markers: `@pytest.mark.promise("one sentence", also="a file of cheaper tests")`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
README, HEAD = TESTS / "README.md", "| promise | with real processes | and cheaper |\n|---|---|---|\n"
REAL = [*TESTS.glob("end_to_end/test_*.py"), *TESTS.glob("notebooks/test_*.py"), TESTS / "monitor/test_screen.py"]


class Shown(NamedTuple):
    """A test of real processes and one of its promises, "" without any. also: a file of cheaper tests, "" for none."""

    test: str
    promise: str = ""
    also: str = ""


def shown() -> Iterator[Shown]:
    """What the markers say, in the order of the files."""
    for file in sorted(REAL):
        for test in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                marks = [mark for mark in test.decorator_list if ".promise(" in ast.unparse(mark)]
                for mark in marks or [ast.Call(test, [], [])]:
                    said = [*mark.args, *(keyword.value for keyword in mark.keywords)]
                    yield Shown(f"{file.relative_to(TESTS)}::{test.name}", *map(ast.literal_eval, said))


def readme() -> str:
    """tests/README.md as it should be."""
    rows = (f"| {one.promise} | `{one.test}` | {one.also and f'`{one.also}`'} |\n" for one in shown())
    return README.read_text(encoding="utf-8").partition(HEAD)[0] + HEAD + "".join(rows)


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")

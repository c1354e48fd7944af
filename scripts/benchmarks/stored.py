"""Stored figures: docs/performance/figures.jsonl, one run of a benchmark a line, oldest first.

id        the benchmark and a number; pages name the record by it
options   the command line
commit    what was checked out; dirty: with changes
from      "docs": taken over from a page, rounded and in the units as it was quoted; commit is the page's
figures   all that the benchmark printed, by key
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/performance/figures.jsonl"
DRIFT = 1.5  # times as much, or as little
Record = dict[str, Any]


def records(file: Path = FILE) -> list[Record]:
    """All of them."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def checked_out() -> Record:
    """The commit, and whether files that a benchmark runs have changes."""
    changed = _git("status", "--porcelain", "--", "tt_cli", "scripts", "tests")
    return {"commit": _git("rev-parse", "--short=7", "HEAD"), "dirty": bool(changed)}


def append(file: Path, bench: str, options: str, run: Record) -> None:
    """A new record at the file's end. run: what was checked out, machine, figures."""
    number = 1 + sum(record["bench"] == bench for record in records(file))
    record = {"id": f"{bench}-{number}", "bench": bench, "options": options, "date": time.strftime("%Y-%m-%d"), **run}
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record, ensure_ascii=False) + "\n")


def last(file: Path, bench: str, options: str, machine: str) -> Record | None:
    """The newest that was printed by this command on a machine alike: processor, instructions, cores."""
    wanted = (bench, options, machine.partition(";")[0])
    alike = (r for r in reversed(records(file)) if (r["bench"], r["options"], r["machine"].partition(";")[0]) == wanted)
    return next((record for record in alike if "from" not in record), None)


def drifted(before: dict[str, Any], now: dict[str, Any], ratio: float = DRIFT) -> list[str]:
    """A line for each number that is more than `ratio` times as large or as small, or not there any more."""
    after, lines = dict(numbers(now)), []
    for key, was in numbers(before):
        value = after.get(key)
        if value is None:
            lines.append(f"{key}: was {was:.4g}, is not there")
        elif value != was and not (value * was > 0 and 1 / ratio <= value / was <= ratio):
            lines.append(f"{key}: was {was:.4g}, is {value:.4g}")
    return lines


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in figures, each with the way to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{key}[{name}]" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{key}[{index}]")
    elif isinstance(value, (int, float)):
        yield key, float(value)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()

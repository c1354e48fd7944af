"""Fills the figures that pages quote with those of docs/performance/figures.jsonl.

    python -m scripts.build_figures            writes the pages
    python -m scripts.build_figures --check    exit code 1 where a page is not as it would be written

A comment that begins with `figures` and a record's id is the template of the block after it, up to an empty line:

    <!-- figures codec-1
    | linear8 | {codec_encode_ns:.3f} | {codec-2[codec_encode_ns]:.3f} | {rows[sign flip][loss]:.2%} |
    each rows: | {row} | {loss:.2%} | {attacks-1[loss]} |
    -->

What is in braces is Python's format of a figure of that record, or of another one by its id; `.1fMiB` has bytes in MiB,
and `.6` the first six letters of words. A line that begins with `each` is repeated for the rows of a table in the
record; other records stand for their row of the same name there, dashes where they have none.

Several ids, oldest first (`<!-- figures attacks-12+attacks-13`), are one table with the newest row of each name.
"""

from __future__ import annotations

import re
import string
import sys
from typing import Any

from scripts.benchmarks import stored

PAGES = [stored.ROOT / "README.md", *sorted((stored.ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- figures (\S+)\n(.*?)\n-->\n\n)(.*?)(?=\n\n|\n?\Z)", re.DOTALL)
Named = dict[str, Any]


class Figures(string.Formatter):
    """Formats figures as pages show them."""

    def format_field(self, value: Any, form: str) -> str:
        """A dash for what was not measured; words, such as "not finite", whatever the form of the other rows."""
        if value is None or isinstance(value, bool):
            return {None: "–", True: "yes", False: "no"}[value]
        if isinstance(value, str):
            return format(value, form) if re.fullmatch(r"\.\d+", form) else value
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if form.endswith("MiB"):
            value, form = value / 2**20, form.removesuffix("MiB")
        return format(value, form).replace("%", " %").replace("-", "−")


def named(value: Any) -> Any:
    """A table's rows by the name in their first column, or by number; anything else as it is."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return value
    names = [str(next(iter(row.values()))) for row in value]
    return dict(zip(names if len({*names}) == len(value) else map(str, range(len(value))), value, strict=True))


def by_id() -> dict[str, Named]:
    """All stored figures."""
    return {r["id"]: {key: named(value) for key, value in r["figures"].items()} for r in stored.records()}


def filled(template: str, ids: str, records: dict[str, Named]) -> str:
    """The block of a template."""
    lines, figures, newest = [], Figures(), ids.split("+")
    for line in template.splitlines():
        if each := re.match(r"each (\w+): ", line):
            tables = {name: found[each[1]] for name, found in records.items() if isinstance(found.get(each[1]), dict)}
            for row, own in {row: own for record in newest for row, own in tables[record].items()}.items():
                beside = {
                    name: table.get(row, dict.fromkeys(next(iter(table.values())))) for name, table in tables.items()
                }
                lines.append(figures.vformat(line[each.end() :], (), beside | {"row": row} | own))
        else:
            lines.append(figures.vformat(line, (), records | records[newest[-1]]))
    return "\n".join(lines)


def built(page: str, records: dict[str, Named]) -> str:
    """A page with all its blocks filled."""
    return BLOCK.sub(lambda found: found[1] + filled(found[3], found[2], records), page)


def main() -> None:
    """Write all pages, or check them."""
    records = by_id()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := built(text, records)) == text:
            continue
        if "--check" in sys.argv:
            sys.exit(f"{page.relative_to(stored.ROOT)} is not of today's figures: run scripts/build_figures.py")
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()

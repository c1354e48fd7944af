"""Links and anchors of Markdown files, as GitHub and mkdocs make them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


def prose(file: Path) -> str:
    """The text without code."""
    return re.sub(r"`[^`\n]+`", "``", FENCE.sub("", file.read_text(encoding="utf-8")))


def anchors(file: Path) -> set[str]:
    """Of its headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", file.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        number = 1
        while (numbered := slug if number == 1 else f"{slug}-{number - 1}") in found:
            number += 1
        found.add(numbered)
    return found


def links(file: Path) -> Iterator[str]:
    """Its links to other files and to itself; not those to other hosts."""
    for target in LINK.findall(prose(file)):
        if not re.match(r"[a-z]+:|//", target):
            yield target


def broken(file: Path) -> list[str]:
    """Its links that lead nowhere, each with the reason."""
    found = []
    for target in links(file):
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists():
            found.append(f"{target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            found.append(f"{target}: no such heading")
    return found

"""`tt explain [TOPIC | LINE]`: what a line of the tool means, and what to do."""

from __future__ import annotations

import argparse
import json
import re

from tt_cli.cli.troubles import Section, explaining, sections
from tt_cli.errors import UsageError

EXAMPLES = """\
tt explain                      the topics
tt explain membership           all that is known of one
tt explain clock                a trouble by the word under which `tt status` counts it
tt explain "no group formed in time"
tt explain data --json          {"topic", "title", "text": Markdown}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt explain` takes."""
    parser.add_argument(
        "words", metavar="TOPIC", nargs="*", help="a topic, the beginning of one, or a line that tt said"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Find the section and print it."""
    if not args.words:
        titles = {section.anchor: section.title for section in sections().values()}
        if args.json:
            print(json.dumps(titles, indent=1, ensure_ascii=False))
        else:
            for anchor, title in titles.items():
                print(f"{anchor:<24} {title}")
        return 0
    section = _found(" ".join(args.words))
    if args.json:
        found = {"topic": section.anchor, "title": section.title, "text": section.text}
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    text = re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", section.text)  # to another topic: its name says enough
    text = re.sub(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)", r"\1 (docs/\2)", text)
    console = Console(highlight=False)
    console.print(section.title, style="bold")
    console.print()
    console.print(Markdown(text))
    return 0


def _found(words: str) -> Section:
    import difflib

    known = sections()
    name = words.strip().lower().replace(" ", "-")
    if name in known:
        return known[name]
    quoted = explaining(words)
    if quoted is not None:
        return quoted
    starting = [anchor for anchor in known if anchor.startswith(name)]
    if len(starting) == 1:
        return known[starting[0]]
    close = starting or difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`tt explain` lists the topics"
    raise UsageError(f"nothing is written about {words!r}; {hint}")

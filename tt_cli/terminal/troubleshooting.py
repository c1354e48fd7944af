"""The troubleshooting page, as the tool itself reads it: which section explains a line that it said."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

BLANK = "…"  # in a quoted line: what differs from time to time
# The section of lines that the page does not quote, and the rooms of tt_cli that say them.
ROOMS_OF = {
    "checkpoints-and-weights": "checkpoint draw",
    "data": "data",
    "disk-and-files": "atomic_write",
    "for-organisers": "auxiliary database history organise web",
    "joining": "doctor monitor peer swarm",
    "membership": "auth identity",
    "memory-and-device": "kernel_choice memory model optim task",
    "running-peers": "supervisor terminal",
    "runs-and-run-files": "run",
    "the-hugging-face-hub": "hub",
}
BY_ROOM = {room: anchor for anchor, rooms in ROOMS_OF.items() for room in rooms.split()}
OTHERWISE = "commands-and-flags"


@dataclass(frozen=True)
class Section:
    """One section. anchor: its name in links. text: Markdown without the heading. patterns: the lines it quotes."""

    anchor: str
    title: str
    text: str
    patterns: tuple[re.Pattern[str], ...]


def documentation() -> Path:
    """The folder docs: in an installed wheel inside the package, in a source tree beside it."""
    package = Path(__file__).parents[1]
    return package / "docs" if (package / "docs").is_dir() else package.parent / "docs"


@cache
def sections() -> dict[str, Section]:
    """All that explain something, by anchor, in the page's order."""
    page = (documentation() / "troubleshooting.md").read_text(encoding="utf-8")
    parts = re.split(r"^### +(.+)$", page, flags=re.MULTILINE)
    page_sections = {}
    for title, rest in zip(parts[1::2], parts[2::2], strict=True):
        text = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
        patterns = tuple(pattern(quote) for quote in quotes(text) if " " in quote.strip(BLANK + " "))
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        page_sections[anchor] = Section(anchor, title, text, patterns)
    return page_sections


def explaining(line: str) -> Section | None:
    """The section that quotes a line most closely; None: none does."""
    quoting = ((quote, section) for section in sections().values() for quote in section.patterns if quote.search(line))
    return max(quoting, key=lambda match: len(match[0].pattern), default=(None, None))[1]


def of_error(error: Exception) -> str:
    """The anchor for an error that was raised: every one has one."""
    section = explaining(str(error))
    return section.anchor if section else BY_ROOM.get(_room(error.__traceback__), OTHERWISE)


def quotes(text: str) -> list[str]:
    """The lines of the tool in a text; commands, which are quoted too, are left out."""
    quoted = (quote for quote in re.findall(r"`([^`\n]+)`", text) if " " in quote)
    return [quote for quote in quoted if not quote.startswith(("tt ", "sudo ", "unset "))]


def pattern(quote: str) -> re.Pattern[str]:
    """Of a quoted line, with anything where it has a BLANK."""
    return re.compile(".*".join(re.escape(part) for part in quote.strip(BLANK).split(BLANK)), re.DOTALL)


def _room(trace: TracebackType | None) -> str:
    """The room of tt_cli whose function raised it, such as "data"."""
    modules = [str(frame.f_globals.get("__name__", "")).split(".") for frame, _ in traceback.walk_tb(trace)]
    return next((names[1] for names in reversed(modules) if names[0] == "tt_cli" and len(names) > 1), "")

"""The page's HTML with what the run is written into it, so that it can be read before, or without, any script."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
"""The built page: index.html and what it loads. `scripts/build_page` makes it."""


def index_html(run: Mapping[str, Any], *, static: bool = False) -> str:
    """Return index.html for a run, given as /api/run answers it. static: the answers are files, which nobody renews.

    Everything of the run is escaped. Where it lacks a fact, the page's own words stay.
    """
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    title = str(run.get("title") or run.get("name") or "")
    if title:
        page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)} · tt</title>", page, count=1)
    if static:
        page = page.replace('<meta charset="utf-8">', '<meta charset="utf-8">\n<meta name="tt-static" content="1">', 1)
    commands = [str(command) for command in run.get("join", {}).get("commands", [])]
    inlined = {
        "name": html.escape(str(run.get("name", ""))),
        "title": html.escape(title),
        "story": "".join(f"<p>{html.escape(str(paragraph))}</p>" for paragraph in run.get("story", [])),
        "join": "".join(map(_command, commands)),
        "night": _command(f"{commands[0]} --hours 23:00-07:00") if commands else "",
    }

    def fill(match: re.Match[str]) -> str:
        return inlined.get(match[1]) or match[2]

    return re.sub(r"<!--tt:(\w+)-->(.*?)<!--/tt:\1-->", fill, page, flags=re.DOTALL)


def _command(text: str) -> str:
    return f'<div class="command"><pre><code>{html.escape(text)}</code></pre></div>'

"""The page's HTML with what the run is written into it, so that it can be read before, or without, any script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

STATIC = Path(__file__).parent / "static"
"""The built page: index.html, a Jinja2 template, and what it loads. `scripts/build_page` makes it."""
_TEMPLATES = Environment(loader=FileSystemLoader(STATIC), autoescape=True, keep_trailing_newline=True)


def index_html(run: Mapping[str, Any], *, static: bool = False) -> str:
    """Return index.html for a run, given as /api/run answers it. static: the answers are files, which nobody renews.

    Everything of the run is escaped. Where it lacks a fact, the page's own words stay.
    """
    return _TEMPLATES.get_template("index.html").render(run=run, static=static)

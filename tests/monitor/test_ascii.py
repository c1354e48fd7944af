"""Terminals without Unicode."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tt_cli.terminal.ascii import asks_for_ascii, to_ascii


@pytest.mark.parametrize(
    ("environment", "asks"),
    [
        ({}, False),  # as in many containers, whose terminal shows UTF-8
        ({"LC_CTYPE": "C.UTF-8"}, False),
        ({"LANG": "en_US.UTF-8"}, False),
        ({"LANG": "C.utf8"}, False),
        ({"LANG": "C"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # what Python makes of LANG=C
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, False),
        ({"LANG": "de_DE.ISO-8859-1"}, True),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, True),
        ({"LC_ALL": "en_US.UTF-8", "LANG": "C"}, False),
    ],
)
def test_who_asks_for_ascii(environment: dict[str, str], asks: bool) -> None:
    assert asks_for_ascii(environment) == asks


def test_every_character_keeps_its_cells() -> None:
    text = "Ada é 陈 😀 – … ━╸─ ⣿⠉⣀⠀ │┤ ▲▼ ½ 한"
    shown = to_ascii(text)
    assert shown.isascii() and cell_len(shown) == cell_len(text)
    assert shown.startswith("Ada e ?? ?? - ~ ==- :'.  || ^v 1")

"""Substitutes for terminals that show nothing but ASCII, and how such a terminal is known."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import lru_cache

from rich.cells import cell_len

_SIGNS = {
    **dict.fromkeys("━╸", "="),
    **dict.fromkeys("─╴–—", "-"),
    **dict.fromkeys("│┤▏▎▍▌▋▊▉", "|"),
    **dict.fromkeys("▁▂▃▄▅▆▇█", "#"),
    **{"·": "-", "…": "~", "▼": "v", "▲": "^", "⇧": "^", "⏎": "*", "°": " ", "×": "x"},
}
_UPPER, _LOWER = 0x01 | 0x02 | 0x08 | 0x10, 0x04 | 0x20 | 0x40 | 0x80
"""Dots of a braille cell's upper and lower half."""


def asks_for_ascii(environment: Mapping[str, str]) -> bool:
    """True where the locale's character set is not UTF-8. Python itself turns LC_CTYPE from "C" into "C.UTF-8"."""
    if locale := environment.get("LC_ALL", ""):
        return "utf" not in locale.lower()
    language, kind = environment.get("LANG", ""), environment.get("LC_CTYPE", "")
    if kind and kind != "C.UTF-8":
        return "utf" not in kind.lower()
    return language in ("C", "POSIX") or bool(language and not kind and "utf" not in language.lower())


@lru_cache(4096)
def to_ascii(text: str) -> str:
    """`text` in as many cells, in ASCII."""
    return text if text.isascii() else "".join(map(_sign, text))


def _sign(character: str) -> str:
    if character.isascii():
        return character
    if 0x2800 <= ord(character) < 0x2900:
        dots = ord(character) - 0x2800
        return ":" if dots & _UPPER and dots & _LOWER else "'" if dots & _UPPER else "." if dots else " "
    plain = unicodedata.normalize("NFKD", character)[:1]
    sign = _SIGNS.get(character) or (plain if plain.isascii() and plain.isprintable() else "?")
    return sign.ljust(cell_len(character), "?")[: cell_len(character)]

"""The pieces that every screen of `tt` is drawn with: numbers in words, bars, lines that fit.

Everything is pure: values in, `rich.text.Text` of at most the given width out. Strings that came over the
network go through `clean`, so that no peer can move another person's cursor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.text import Text

NONE = "–"
PHASE_STYLES: Mapping[str, str] = {
    "starting": "blue",
    "syncing": "blue",
    "training": "green",
    "averaging": "cyan",
    "serving": "green",
    "waiting": "yellow",
    "paused": "yellow",
    "leaving": "magenta",
    "ended": "dim",
    "failed": "bold red",
}
LEVEL_STYLES: Mapping[str, str] = {"info": "", "warning": "yellow", "error": "red"}


def clean(text: str) -> str:
    """`text` on one line without control, escape or direction characters (they become "?")."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """`text` as it is, but for control, escape and direction characters (they become "?"); newlines stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def short_id(peer_id: str) -> str:
    """The end of a peer id, which differs between peers; the beginning is the same for all of them."""
    peer_id = clean(peer_id)
    return peer_id if len(peer_id) <= 8 else f"…{peer_id[-6:]}"


def short_digest(digest: str) -> str:
    return clean(digest)[:8] or NONE


def byte_count(count: float) -> str:
    """Bytes in decimal units: 999 B, 12.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def duration(seconds: float | None) -> str:
    """Seconds in words of at most two units: 12 s, 3 min 20 s, 2 h 05 min, 4 d 3 h; a dash for unknown."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def rate(per_second: float) -> str:
    """Samples per second with three digits that mean something: 0.35, 12.1, 1,204."""
    if per_second >= 99.95:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 9.995 else f"{per_second:.2f}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def loss_value(loss: float | None) -> str:
    if loss is None or not math.isfinite(loss):
        return NONE
    return f"{loss:.3f}" if abs(loss) < 1000 else f"{loss:.3g}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def bar(fraction: float, width: int, style: str = "cyan") -> Text:
    """A progress bar of exactly `width` cells; `fraction` is cut to 0..1."""
    fraction = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 0.0
    halves = round(2 * width * fraction)
    text = Text("━" * (halves // 2) + "╸" * (halves % 2), style=style)
    text.append("─" * (width - halves // 2 - halves % 2), style="bright_black")
    return text


def fit(text: Text, width: int) -> Text:
    """`text` on one line of at most `width` cells, cut with an ellipsis."""
    text = text.copy()
    text.no_wrap = True
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def left_right(left: Text, right: Text, width: int) -> Text:
    """`left` and, flush at `width`, `right`; `left` is cut first."""
    right = fit(right, width)
    room = width - right.cell_len - 2
    if room < 1:
        return fit(left, width)
    left = fit(left, room)
    return Text.assemble(left, " " * (width - left.cell_len - right.cell_len), right)


def labelled(label: str, *parts: str | tuple[str, str] | Text, width: int) -> Text:
    """A dim label in a column of ten cells, then `parts`."""
    return fit(Text.assemble((f"{label:<10}", "dim"), *parts), width)

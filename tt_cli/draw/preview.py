"""Pictures in the terminal: by the graphics protocol that it is known to speak, else as coloured half blocks.

What a terminal can do is read from the environment alone: nothing is asked that might go unanswered. Inside tmux
and screen, which pass no graphics through, only half blocks are shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

import numpy as np
from PIL import Image
from rich.cells import cell_len, set_cell_size

from tt_cli.draw.contact_sheet import contact_sheet

if TYPE_CHECKING:
    from tt_cli.draw.drawing import Drawing

Way = Literal["kitty", "iterm", "blocks"]
WAYS: tuple[Way, ...] = ("kitty", "iterm", "blocks")
WIDEST = 1200  # pixels of a picture that is sent to a terminal
KITTY_CHUNK = 4096  # bytes of base64 in one escape sequence, the protocol's limit
ACROSS = 4
MOST_CELLS = 32  # across one picture of half blocks
LOWEST = 9  # lines of a row of pictures with its captions


def way_to_show(stream: TextIO, environ: Mapping[str, str], wanted: str = "auto") -> Way | None:
    """The way to show pictures on `stream`, None for not at all: never where it is no terminal with Unicode.

    wanted: "auto", "never", or one of WAYS, which is then believed.
    """
    able = environ.get("TERM", "") not in ("", "dumb") and "utf" in (stream.encoding or "").lower()
    if wanted == "never" or not stream.isatty() or not able:
        return None
    for way in WAYS:
        if wanted == way:
            return way
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if not environ.get("TMUX") and not term.startswith(("screen", "tmux")):
        if "KITTY_WINDOW_ID" in environ or term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
            return "kitty"
        if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
            return "iterm"
    return "blocks" if environ.get("COLORTERM", "") in ("truecolor", "24bit") else None


def shown_in_terminal(drawings: Sequence[Drawing], way: Way, columns: int, lines: int) -> str:
    """Text for a terminal of `columns` x `lines` cells that shows drawings, in their order, on one screen."""
    lines = max(4, lines - 4)  # the command itself, and the next prompt, stay in sight
    if way == "blocks":
        return _in_blocks(drawings, columns, lines)
    sheet = contact_sheet(drawings)
    sheet.thumbnail((WIDEST, WIDEST), Image.Resampling.BICUBIC)
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    # Cells are about twice as high as wide: the side that would not fit decides the size.
    wide = sheet.width * lines * 2 > sheet.height * columns
    text = base64.b64encode(png.getvalue()).decode()
    return (_kitty if way == "kitty" else _iterm)(text, min(columns, 100) if wide else None, lines)


def _kitty(text: str, columns: int | None, lines: int) -> str:
    """The kitty graphics protocol: a PNG, placed at the cursor, with the terminal's answers switched off (q=2)."""
    size = f"c={columns}" if columns else f"r={lines}"
    chunks = [text[start : start + KITTY_CHUNK] for start in range(0, len(text), KITTY_CHUNK)]
    parts = []
    for number, chunk in enumerate(chunks):
        first = f"a=T,f=100,q=2,{size}," if number == 0 else ""
        parts.append(f"\x1b_G{first}m={int(number < len(chunks) - 1)};{chunk}\x1b\\")
    return "".join(parts) + "\n"


def _iterm(text: str, columns: int | None, lines: int) -> str:
    """iTerm2's inline images."""
    size = f"width={columns}" if columns else f"height={lines}"
    return f"\x1b]1337;File=inline=1;preserveAspectRatio=1;{size}:{text}\x07\n"


def _in_blocks(drawings: Sequence[Drawing], columns: int, lines: int) -> str:
    """Rows of pictures, each above its prompt; what does not fit is counted."""
    across = max(1, min(ACROSS, len(drawings), (columns + 1) // 13))
    share = lines // -(-len(drawings) // across)  # of the lines for each row of pictures, were all to fit
    cells = min(MOST_CELLS, (columns + 1) // across - 1, 2 * (max(share, LOWEST) - 1), 2 * (lines - 2))
    cells = max(2, cells // 2 * 2)
    rows = max(1, lines // (cells // 2 + 1))
    shown = drawings[: rows * across]
    text: list[str] = []
    for start in range(0, len(shown), across):
        row = shown[start : start + across]
        text += map(" ".join, zip(*(half_blocks(drawing.picture, cells) for drawing in row), strict=True))
        before = ["", *(drawing.prompt for drawing in row)]
        captions = [_caption(d.prompt, cells) if d.prompt != b else "" for d, b in zip(row, before, strict=False)]
        text.append(" ".join(set_cell_size(caption, cells) for caption in captions).rstrip())
    if left := len(drawings) - len(shown):
        text.append(f"… and {left} more")
    return "\n".join(text) + "\n"


def half_blocks(picture: np.ndarray, cells: int) -> list[str]:
    """A square picture (H, H, 3) uint8 as `cells` // 2 lines of `cells` cells: each cell is two pixels, ▀ above."""
    small = np.asarray(Image.fromarray(picture).resize((cells, cells // 2 * 2), Image.Resampling.BICUBIC))
    lines = []
    for top, bottom in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        pairs = zip(top, bottom, strict=True)
        line = "".join(f"\x1b[38;2;{a};{b};{c};48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in pairs)
        lines.append(f"{line}\x1b[0m")
    return lines


def _caption(prompt: str, cells: int) -> str:
    """A prompt in at most `cells` cells, without what would move the cursor."""
    caption = "".join(letter if letter.isprintable() else " " for letter in prompt)
    return caption if cell_len(caption) <= cells else set_cell_size(caption, cells - 1) + "…"

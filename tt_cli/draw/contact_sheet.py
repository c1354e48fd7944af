"""Contact sheets: all drawings on one picture, each prompt under its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from tt_cli.draw.drawing import Drawing

PICTURE = 256  # pixels: small pictures are enlarged by a whole factor to at most this
GAP = 16
FONT_SIZE = 20
LINE = 26
MOST_LINES = 3
MOST_PICTURES = 1024  # a quarter of a gigabyte of pixels
PAPER, INK = (255, 255, 255), (40, 40, 40)

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def contact_sheet(drawings: Sequence[Drawing], columns: int | None = None) -> Image.Image:
    """Lay out drawings, `columns` side by side; those of one prompt stay together above one caption.

    Without `columns` there are 4, and 8 or 16 where a prompt has many. Drawings of the same prompt must follow one
    another, as `draw` returns them; all have the same size. What is beyond MOST_PICTURES is counted.
    """
    some = drawings[:MOST_PICTURES]
    strips = [(prompt, list(group)) for prompt, group in groupby(some, key=lambda d: d.prompt)]
    if not strips:
        raise ValueError("a contact sheet needs a drawing")
    if columns is None:
        most = max(len(group) for _, group in strips)
        columns = 4 if most <= 16 else 8 if most <= 64 else 16
    font = ImageFont.load_default(FONT_SIZE)
    height, width = drawings[0].picture.shape[:2]
    factor = max(1, PICTURE // max(height, width))
    size = width * factor, height * factor
    cell_width, cell_height = size[0] + GAP, size[1] + GAP
    across = min(columns, max(len(group) for _, group in strips))  # pictures side by side in a strip
    beside = min(columns // across, len(strips))  # strips side by side
    strip_width = across * cell_width

    pictures: list[tuple[tuple[int, int], Drawing]] = []
    lines: list[tuple[tuple[int, int], str]] = []
    y = GAP
    for start in range(0, len(strips), beside):
        row = strips[start : start + beside]
        captions = [_wrap(prompt, font, strip_width - GAP) for prompt, _ in row]
        below = y + max(-(-len(group) // across) for _, group in row) * cell_height
        for place, ((_, group), caption) in enumerate(zip(row, captions, strict=True)):
            x = GAP + place * strip_width
            for number, drawing in enumerate(group):
                down, right = divmod(number, across)
                pictures.append(((x + right * cell_width, y + down * cell_height), drawing))
            middle = x + (min(across, len(group)) * cell_width - GAP) // 2
            lines += [((middle, below - GAP // 2 + number * LINE), text) for number, text in enumerate(caption)]
        y = below + max(map(len, captions)) * LINE + GAP
    if left := len(drawings) - len(some):
        lines.append(((GAP + strip_width // 2, y), f"… and {left} more"))
        y += LINE + GAP

    sheet = Image.new("RGB", (GAP + beside * strip_width, y), PAPER)
    for corner, drawing in pictures:
        # decoded pictures are smooth, and blocks of equal pixels would hide what they show
        sheet.paste(Image.fromarray(drawing.picture).resize(size, Image.Resampling.BICUBIC), corner)
    pen = ImageDraw.Draw(sheet)
    for top, text in lines:
        pen.text(top, text, fill=INK, font=font, anchor="ma")
    return sheet


def _wrap(text: str, font: Font, width: float) -> list[str]:
    """Lines of at most `width` pixels, broken between words where possible; what is too much ends in "…"."""
    lines = [""]
    for word in text.split():
        if len(lines) > MOST_LINES:
            break
        rest = word
        joined = f"{lines[-1]} {rest}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while len(lines) <= MOST_LINES and font.getlength(rest) > width:
            letters = range(2, len(rest))  # one, where not even two fit
            fits = 1 + bisect_right(letters, width, key=lambda n: font.getlength(rest[:n]))
            lines[-1], rest = rest[:fits], rest[fits:]
            lines.append("")
        lines[-1] = rest
    if len(lines) > MOST_LINES:
        lines = lines[:MOST_LINES]
        while lines[-1] and font.getlength(lines[-1] + "…") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "…"
    return lines

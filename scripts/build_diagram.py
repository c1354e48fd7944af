"""Draws docs/images/gradient.svg: one gradient's way between two peers, from backward to the next forward.

    python scripts/build_diagram.py

The boxes stand in STAGES; a test compares the committed picture with what this makes.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "docs/images/gradient.svg"
# What happens, and in which file. Left to right, then down.
STAGES = (
    ("1  Forward, backward", "a micro-batch on the device", "peer/trainer.py"),
    ("2  Accumulate", "float32 sums, by samples", "swarm/compression/accumulator.py"),
    ("3  Encode", "a byte for each number", "swarm/compression/linear8.py"),
    ("4  Group", "who is in this round", "swarm/matchmaking.py"),
    ("5  Reduce", "each peer averages its parts", "swarm/allreduce/reducer.py"),
    ("6  Commit", "all agree, or nobody steps", "swarm/allreduce/commit.py"),
    ("7  Step", "8-bit LAMB on the CPU", "optim/lamb.py"),
    ("8  Next forward", "parameters to the device", "peer/trainer.py"),
)
ACROSS, WIDTH, HEIGHT, GAP, MARGIN = 4, 210, 92, 34, 12
SHARED = range(3, 6)  # stages in which peers talk with each other
STYLE = """\
  text { font: 13px sans-serif; fill: #222 }
  .name { font-weight: bold; font-size: 14px }
  .file { font-family: monospace; font-size: 11px; fill: #555 }
  rect { fill: #f3f4f6; stroke: #6b7280 }
  rect.shared { fill: #e0ecff; stroke: #2458b3 }
  path { fill: none; stroke: #6b7280; stroke-width: 1.5 }"""


def picture() -> str:
    """The SVG's text."""
    rows = -(-len(STAGES) // ACROSS)
    width = 2 * MARGIN + ACROSS * WIDTH + (ACROSS - 1) * GAP
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        '  role="img">',
        "<title>One gradient's way, in eight stages</title>",
        f"<style>\n{STYLE}\n</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#6b7280"/></marker></defs>',
        f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for number, (name, words, file) in enumerate(STAGES):
        x, y = corner(number)
        shared = ' class="shared"' if number in SHARED else ""
        lines.append(f'<rect{shared} x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        for offset, kind, text in ((26, "name", name), (50, "", words), (74, "file", file)):
            lines.append(f'<text class="{kind}" x="{x + 12}" y="{y + offset}">{escape(text)}</text>')
        if number + 1 < len(STAGES):
            lines.append(f'<path d="{arrow(number)}" marker-end="url(#head)"/>')
    lines.append(f'<text x="{MARGIN}" y="{height - MARGIN}">Blue: with the other peers. Grey: on this machine.</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def corner(number: int) -> tuple[int, int]:
    """Upper left corner of a stage's box; every other row runs back."""
    row, column = divmod(number, ACROSS)
    if row % 2:
        column = ACROSS - 1 - column
    return MARGIN + column * (WIDTH + GAP), MARGIN + row * (HEIGHT + GAP)


def arrow(number: int) -> str:
    """From a stage's box to that of the next one."""
    (x, y), (next_x, next_y) = corner(number), corner(number + 1)
    if next_y > y:
        return f"M{x + WIDTH // 2} {y + HEIGHT} V{next_y - 2}"
    if next_x > x:
        return f"M{x + WIDTH} {y + HEIGHT // 2} H{next_x - 2}"
    return f"M{x} {y + HEIGHT // 2} H{next_x + WIDTH + 2}"


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")

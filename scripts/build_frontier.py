"""Draws docs/images/local-steps.svg: where runs with local steps end, by the bytes that a member sends.

    python -m scripts.build_frontier

The points are those of the newest record of `scripts/bench local_steps --frontier`; a test compares the committed
picture with what this makes.
"""

from __future__ import annotations

import math
from typing import Any

from scripts.benchmarks import stored

FILE = stored.ROOT / "docs/images/local-steps.svg"
WIDTH, HEIGHT, MARGIN = 720, 460, 56
COLOURS = {0: "#444", 512: "#7c3aed", 256: "#2458b3", 128: "#0f766e", 32: "#b35c24"}  # by elements kept


def newest() -> dict[str, Any]:
    """The figures of the newest frontier."""
    found = [record["figures"] for record in stored.records(stored.FILE) if "frontier" in record["figures"]]
    return dict(found[-1])


def picture(figures: dict[str, Any]) -> str:
    """The SVG's text."""
    rows = figures["frontier"]
    bytes_up, losses = ([row[key] for row in rows] for key in ("up_bytes", "final_loss"))
    left, right = math.floor(math.log10(min(bytes_up))), math.ceil(math.log10(max(bytes_up)))
    bottom, top = math.log10(min(losses)) - 0.25, math.log10(max(losses)) + 0.1

    def x(value: float) -> float:
        return MARGIN + (math.log10(value) - left) / (right - left) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (math.log10(value) - bottom) / (top - bottom) * (HEIGHT - 2 * MARGIN)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        "<title>Final loss of local steps by the bytes that a member sends</title>",
        "<style>text { font: 12px sans-serif; fill: #222 } path { fill: none; stroke: #ddd }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for power in range(left, right + 1):
        lines.append(f'<path d="M{x(10**power):.1f},{MARGIN}V{HEIGHT - MARGIN}"/>')
        place = f'x="{x(10**power):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle"'
        lines.append(f"<text {place}>{10**power:g}</text>")
    for loss in (value for value in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if bottom <= math.log10(value) <= top):
        lines.append(f'<path d="M{MARGIN},{y(loss):.1f}H{WIDTH - MARGIN}"/>')
        lines.append(f'<text x="{MARGIN - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    middle = f'x="{WIDTH / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle"'
    lines.append(f"<text {middle}>bytes up for each parameter, in the whole run</text>")
    lines.append(f'<text x="{MARGIN}" y="20">final loss after {figures["samples"]:,} samples</text>')
    best = sorted((row["up_bytes"], row["final_loss"]) for row in rows if row["best"])
    corners = "".join(
        f"{'L' if number else 'M'}{x(sent):.1f},{y(loss):.1f}" for number, (sent, loss) in enumerate(best)
    )
    lines.append(f'<path d="{corners}" style="stroke:#999;stroke-dasharray:4"/>')
    labels: list[tuple[float, float]] = []
    labelled: list[tuple[str, str, float, float]] = []
    for row in rows:
        across, down, colour = x(row["up_bytes"]), y(row["final_loss"]), COLOURS[row["kept"]]
        corner = f"M{across:.1f},{down - 5:.1f}"
        if row["inner"] == "muon":
            lines.append(f'<rect x="{across - 4:.1f}" y="{down - 4:.1f}" width="8" height="8" fill="{colour}"/>')
        elif row["four_bits"]:
            lines.append(f'<path d="{corner}l5,9h-10z" style="fill:{colour};stroke:none"/>')
        elif row["momentum"]:
            lines.append(f'<path d="{corner}l5,5l-5,5l-5,-5z" style="fill:{colour};stroke:none"/>')
        else:
            lines.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"/>')
        words = f"H {row['inner_steps']}"
        if any(
            (one, other) == (words, colour) and math.hypot(across - left_of, down - above) < 40
            for one, other, left_of, above in labelled
        ):
            continue  # another one of these right beside it says so
        labelled.append((words, colour, across, down))
        away = 13 if row["inner"] == "muon" else -13
        beside, place = across + 4, down + (16 if away > 0 else -6)
        while any(abs(beside - other) < 30 and abs(place - level) < 12 for other, level in labels):
            place += away
        labels.append((beside, place))
        lines.append(f'<text x="{beside:.1f}" y="{place:.1f}" style="fill:{colour}">{words}</text>')
    for number, (kept, colour) in enumerate(COLOURS.items()):
        words = f"{kept} of 4,096" if kept else "all, in 8 bits"
        place = f'x="{WIDTH - MARGIN - 90}" y="{MARGIN + 16 + 18 * number}"'
        lines.append(f'<text {place} style="fill:{colour}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture(newest()), encoding="utf-8")
    print(f"wrote {FILE.relative_to(stored.ROOT)}")

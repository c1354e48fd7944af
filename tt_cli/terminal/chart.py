"""Curves of braille dots with axes: values over steps, and filled ones over time. Pure: points in, lines out.

A cell holds two columns of four dots. Of many points the moving average is the curve; the lowest and highest value of
each column lie dim behind it.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence

from rich.text import Text

from tt_cli.supervisor.peer_state import LARGEST_LOSS

BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a Unicode braille pattern: four rows of two columns."""
Points = Sequence[tuple[float, float]]
"""(x, y), x rising."""
Ticks = list[tuple[float, str]]
"""(value, its label)."""

SPARKS = "▁▂▃▄▅▆▇█"
LABEL = 8  # cells of the labels of the y axis
SMOOTH = 60  # a curve of more points is the mean of so many-th parts of them
FACTORS = (range(1, 10), (1, 2, 5), (1, 3))
"""Of the powers of ten, of which a logarithmic axis has labels where there is room."""
FILLED = 3  # rows up to which an area is filled
LEAST = (LABEL + 6, 3)  # columns and rows of the smallest chart


def line_chart(points: Points, width: int, height: int, *, log: bool = False) -> list[Text]:
    """`height` lines of at most `width` cells, the last with the x axis' steps. log: a logarithmic y axis.

    No line where there is nothing to draw or no room. On a logarithmic axis what is not above 0 is left out.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and abs(y) < LARGEST_LOSS and (y > 0 or not log)]
    rows, columns = height - 1, 2 * (width - LABEL - 1)
    if not points or width < LEAST[0] or height < LEAST[1]:
        return []
    scale = math.log if log else float
    low, high = min(y for _, y in points), max(y for _, y in points)
    ticks = log_ticks(low, high, max(2, rows // 2)) if log else nice_ticks(low, high, max(3, rows // 3))
    bottom, top = scale(low), scale(high)
    dots = 4 * rows

    def dot_of(y: float) -> int:
        return round((dots - 1) * (top - scale(y)) / (top - bottom)) if top > bottom else dots // 2

    window = len(points) // SMOOTH
    curve, cloud = _Grid(columns // 2, rows), _Grid(columns // 2, rows)
    means = [(column, dot_of(statistics.fmean(ys))) for column, ys in _columns(smoothed(points, window), columns)]
    for start, end in itertools.pairwise([means[0], *means]):
        curve.line(start, end)
    for column, values in _columns(points, columns) if window > 1 else ():
        cloud.line((column, dot_of(max(values))), (column, dot_of(min(values))))
    labels = {dot_of(value) // 4: name for value, name in ticks or [(low, figure(low))]}
    first, last = points[0][0], points[-1][0]
    steps = [(x, f"{x:,.0f}") for x in (first, last)] + nice_ticks(first, last, max(1, width // 14), whole=True)
    return [*_with_axis(curve, cloud, labels, "cyan"), _x_axis(steps, first, last, width)]


def area_chart(points: Points, width: int, height: int, *, style: str = "cyan") -> list[Text]:
    """As `line_chart`, of values from 0 up that hold until the next; x: Unix time, shown as the clock.

    A low chart is filled, for its few dots would be lost.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and 0 <= y < LARGEST_LOSS]
    rows, columns = height - 1, 2 * (width - LABEL - 1)
    if len(points) < 2 or width < LEAST[0] or height < LEAST[1]:
        return []
    high = max(y for _, y in points) or 1.0
    dots, filled = 4 * rows, rows <= FILLED
    grid = _Grid(columns // 2, rows)
    tops = [(column, dots - 1 - round((dots - 1) * max(values) / high)) for column, values in _columns(points, columns)]
    for (start, top), (end, following) in zip(tops, [*tops[1:], (columns, tops[-1][1])], strict=True):
        for column in range(start, end):
            grid.line((column, top), (column, dots - 1 if filled else top))
        if end < columns:
            grid.line((end, top), (end, following))
    first, last = points[0][0], points[-1][0]
    shown = max(1, min(6, (width - LABEL) // 14))
    times = [first + (last - first) * i / shown for i in range(shown + 1)]
    labels = {rows - 1: "0", 0: figure(high)}
    form = "%H:%M:%S" if last - first < 600 else "%H:%M" if last - first < 86400 else "%d %b"
    clock = [(at, time.strftime(form, time.localtime(at))) for at in times]
    return [*_with_axis(grid, _Grid(columns // 2, rows), labels, style), _x_axis(clock, first, last, width)]


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per value, or per stretch of values where there are more than `width`."""
    points = [(float(at), value) for at, value in enumerate(v for v in values if abs(v) < LARGEST_LOSS)]
    if not points or width < 1:
        return ""
    means = [statistics.fmean(stretch) for _, stretch in _columns(points, min(width, len(points)))]
    low, span = min(means), max(means) - min(means)
    return "".join(SPARKS[min(7, int(8 * (mean - low) / span)) if span else 3] for mean in means)


def figure(value: float) -> str:
    """At most seven cells: 0.0213, 3.21, 12.5, 1,204, 1.2e+06."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def nice_ticks(low: float, high: float, most: int, *, whole: bool = False) -> Ticks:
    """Multiples of 1, 2 or 5 times a power of ten between low and high, at most `most`. whole: of integers only."""
    span = high - low
    if not 0 < span < math.inf or most < 1:
        return []
    power = math.floor(math.log10(span / most)) if span / most > 1e-300 else 0
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * 10.0**power
        if whole and step < 1:
            continue
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            digits = 0 if whole else max(0, -math.floor(math.log10(step) + 1e-9))
            return [(n * step, f"{n * step:,.{min(digits, 6)}f}") for n in range(first, last + 1)]
    return []


def log_ticks(low: float, high: float, most: int) -> Ticks:
    """Powers of ten, with multiples of them where there is room, else fewer; else as on a linear axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    grids = [[factor * 10.0**power for power in powers for factor in factors] for factors in FACTORS]
    grids += [[10.0**power for power in powers if power % stride == 0] for stride in (1, 2, 5, 10, 20, 50, 100)]
    for values in grids:
        ticks = [(value, figure(value)) for value in values if low <= value <= high]
        if 2 <= len(ticks) <= most:
            return ticks
    return [tick for tick in nice_ticks(low, high, most) if low <= tick[0] <= high]


def smoothed(points: Points, window: int) -> Points:
    """The mean of each point and `window` others around it; fewer at the ends."""
    if window < 2:
        return points
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    half, count = window // 2, len(points)
    spans = [(max(0, i - half), min(count, i + half + 1)) for i in range(count)]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans, strict=True)]


class _Grid:
    """Dots in cells of 2 x 4."""

    def __init__(self, width: int, height: int) -> None:
        self.cells = [[0] * width for _ in range(height)]

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """The dots between two dots, both with them."""
        (x0, y0), (x1, y1) = start, end
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            x, y = x0 + round(i * (x1 - x0) / count), y0 + round(i * (y1 - y0) / count)
            self.cells[y // 4][x // 2] |= BRAILLE[y % 4][x % 2]


def _columns(points: Points, columns: int) -> list[tuple[int, list[float]]]:
    """The values of each dot column that has any, in their order."""
    first, span = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    values: dict[int, list[float]] = {}
    for x, y in points:
        values.setdefault(min(columns - 1, int((x - first) * (columns - 1) / span)), []).append(y)
    return sorted(values.items())


def _with_axis(curve: _Grid, behind: _Grid, labels: dict[int, str], style: str) -> list[Text]:
    rows = []
    for row, cells in enumerate(curve.cells):
        label = labels.get(row, "")
        line = Text(f"{label[: LABEL - 1]:>{LABEL - 1}} {'┤' if label else '│'}", style="bright_black")
        pairs = zip(cells, behind.cells[row], strict=True)
        for bright, run in itertools.groupby(pairs, key=lambda pair: bool(pair[0])):  # a style of each cell is slow
            dots = "".join(chr(0x2800 + (cell or other)) if cell or other else " " for cell, other in run)
            line.append(dots, style if bright else f"dim {style}")
        rows.append(line)
    return rows


def _x_axis(ticks: Ticks, first: float, last: float, width: int) -> Text:
    """Labels below their places: of both ends, then those between that touch no other."""
    line = [" "] * width
    ends = [tick for tick in ticks if tick[0] == last] + [tick for tick in ticks if tick[0] == first]
    for x, label in [*ends, *ticks]:
        at = LABEL + round((width - LABEL - 1) * (x - first) / ((last - first) or 1.0))
        start = min(max(at - len(label) // 2, LABEL), width - len(label))
        around = line[max(0, start - 2) : start + len(label) + 2]
        if len(label) <= width - LABEL and set(around) == {" "}:
            line[start : start + len(label)] = label
    return Text("".join(line).rstrip(), style="bright_black")

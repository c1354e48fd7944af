"""The table of every screen: columns that grow as far as there is room, and give way in the order of their worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.text import Text

from tt_cli.terminal.format import fit

Row = TypeVar("Row")
GAP = Text("  ")

NEEDED = 6
"""A column with a smaller `keep` is shown where the needed have what is fair; one with 0 beside whole ones."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """least, most: cells. keep: where there is too little room, columns with the smallest are left out first.

    text: what a row's cell says. by: what to sort by. falls: sorted by it, the largest comes first. fair: cells that a
    column has before those that are not needed are shown beside it; 0 for `least`.
    """

    title: str
    least: int
    most: int
    keep: int
    text: Callable[[Row], Text | str]
    by: Callable[[Row], str | float] = lambda row: 0.0
    right: bool = False
    falls: bool = False
    fair: int = 0


def widths(columns: Sequence[Column[Row]], width: int) -> dict[int, int]:
    """Cells of each column that has room in `width`, two spaces apart: all but fixed ones grow, the needed first."""
    shown = list(range(len(columns)))
    least = [column.least for column in columns]
    fair = [max(least[i], column.fair) for i, column in enumerate(columns)]
    whole = [max(least[i], column.most) for i, column in enumerate(columns)]
    for i in sorted(shown, key=lambda i: columns[i].keep):
        wanted = fair if columns[i].keep else whole
        if columns[i].keep < NEEDED and sum(wanted[j] for j in shown) + 2 * (len(shown) - 1) > width:
            shown.remove(i)
    while len(shown) > 1 and sum(least[i] for i in shown) + 2 * (len(shown) - 1) > width:
        shown.remove(min(shown, key=lambda i: columns[i].keep))
    cells = {i: least[i] for i in shown}
    free = width - sum(cells.values()) - 2 * (len(shown) - 1)
    for i in sorted(shown, key=lambda i: -columns[i].keep):
        more = max(0, min(free, columns[i].most - cells[i]))
        cells[i] += more
        free -= more
    return cells


def heading(columns: Sequence[Column[Row]], cells: dict[int, int], sorted_by: int = -1, falling: bool = False) -> Text:
    """The titles; the one that is sorted by has an arrow and a line below."""
    line = []
    for i, width in cells.items():
        title = columns[i].title
        if i == sorted_by:
            title = f"{title[: width - 1]}{'▼' if falling else '▲'}"
        line.append(_cell(title, width, columns[i].right))
        line[-1].stylize("bold underline" if i == sorted_by else "dim")
    return GAP.join(line)


def row_line(columns: Sequence[Column[Row]], cells: dict[int, int], row: Row) -> Text:
    """One row, each cell cut to its width."""
    return GAP.join(_cell(columns[i].text(row), width, columns[i].right) for i, width in cells.items())


def _cell(text: Text | str, width: int, right: bool) -> Text:
    cell = fit(text if isinstance(text, Text) else Text(text), width)
    cell.align("right" if right else "left", width)
    return cell


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> list[Text]:
    """A heading and one line per row, none wider than `width`; no column is wider than what is in it."""
    fitted = []
    for column in columns:
        texts = [column.text(row) for row in rows]
        longest = max([cell_len(column.title), *(cell_len(str(text)) for text in texts)])
        least, most, fair = (min(cells, longest) for cells in (column.least, column.most, column.fair))
        fitted.append(replace(column, least=least, most=most, fair=fair))
    cells = widths(fitted, width)
    lines = [heading(columns, cells), *(row_line(columns, cells, row) for row in rows)]
    for line in lines:
        line.rstrip()
    return [fit(line, width) for line in lines]

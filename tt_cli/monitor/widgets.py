"""The widgets that views are made of: lines that scroll, and a table of which only the visible rows are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tt_cli.terminal.table import Column, Row, heading, row_line, widths

Draw = Callable[[int, int], list[Text]]
"""(width, height) in cells → lines, more than `height` where they scroll."""


class Lines(ScrollView, can_focus=True):
    """Lines that are drawn anew for every size and at every `update`."""

    def __init__(self, draw: Draw, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._draw, self._lines = draw, [Text("")]

    def update(self) -> None:
        """Draw what is known now."""
        width, height = self.scrollable_content_region.size
        if width < 1 or height < 1:  # not laid out yet
            return
        self._lines = self._draw(width, height)
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()

    def on_resize(self) -> None:
        self.update()

    def render_line(self, y: int) -> Strip:
        """Line `y` of the screen."""
        return _strip(self, self._lines, y + round(self.scroll_offset.y))


class PeerTable(ScrollView, Generic[Row], can_focus=True):
    """Rows under a heading that stays. Their texts are made when they are seen: 1,000 rows cost what 20 do.

    rows are given with `show`, which keeps the cursor on the row of the same `identity`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", "sort back", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    def __init__(
        self, columns: Sequence[Column[Row]], identity: Callable[[Row], str], sorted_by: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._columns, self._identity = columns, identity
        self.sorted_by, self.falling = sorted_by, columns[sorted_by].falls
        self.rows: list[Row] = []
        self.cursor = 0
        self._cells: dict[int, int] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows, sorted as before."""
        held = self._identity(self.rows[self.cursor]) if self.rows else ""
        self.rows = sorted(rows, key=self._identity)
        self.rows.sort(key=self._columns[self.sorted_by].by, reverse=self.falling)
        self.cursor = next((at for at, row in enumerate(self.rows) if self._identity(row) == held), self.cursor)
        self.cursor = max(0, min(self.cursor, len(self.rows) - 1))
        self._fit()

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def _fit(self) -> None:
        size = self.scrollable_content_region.size
        self._cells = widths(self._columns, size.width)
        self.virtual_size = Size(size.width, len(self.rows) + 1)
        self.refresh()

    def on_resize(self) -> None:
        self._fit()
        self._into_view()

    def render_line(self, y: int) -> Strip:
        """The heading, or the row that is scrolled to line `y`."""
        width = self.scrollable_content_region.width
        if y == 0:
            return _strip(self, [heading(self._columns, self._cells, self.sorted_by, self.falling)], 0)
        at = y - 1 + round(self.scroll_offset.y)
        if at >= len(self.rows):
            return Strip.blank(width)
        line = row_line(self._columns, self._cells, self.rows[at])
        if at == self.cursor and self.has_focus:
            line.pad_right(width - line.cell_len)
            line.stylize("reverse")
        return _strip(self, [line], 0)

    def on_click(self, event: events.Click) -> None:
        """On a title: sort by it, or turn the order round; on a row: go there."""
        if event.y > 0:
            self._go_to(event.y - 1 + round(self.scroll_offset.y))
            return
        start = 0
        for column, cells in self._cells.items():
            if start <= event.x < start + cells + 2:
                self._sort_by(column, turn=column == self.sorted_by)
            start += cells + 2

    def action_sort(self, step: int) -> None:
        """Sort by the next column that is shown."""
        shown = list(self._cells)
        at = shown.index(self.sorted_by) if self.sorted_by in shown else 0
        self._sort_by(shown[(at + step) % len(shown)])

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._sort_by(self.sorted_by, turn=True)

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self._go_to(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by what is seen at once."""
        self._go_to(self.cursor + pages * max(1, self.scrollable_content_region.height - 2))

    def _sort_by(self, column: int, *, turn: bool = False) -> None:
        self.falling = not self.falling if turn else self._columns[column].falls
        self.sorted_by = column
        self.show(self.rows)
        self._go_to(self.cursor)

    def _go_to(self, row: int) -> None:
        self.cursor = max(0, min(row, len(self.rows) - 1))
        self._into_view()
        self.refresh()
        self.post_message(Moved())

    def _into_view(self) -> None:
        seen = max(1, self.scrollable_content_region.height - 1)
        top = round(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + seen:
            self.scroll_to(y=self.cursor - seen + 1, animate=False)


class Moved(Message):
    """Another row of a table is selected."""


def _strip(widget: ScrollView, lines: Sequence[Text], at: int) -> Strip:
    width = widget.scrollable_content_region.width
    if at >= len(lines):
        return Strip.blank(width)
    rendered = lines[at].render(widget.app.console)
    # Filters, as for NO_COLOR, want a style of every segment.
    return Strip([Segment(text, style or Style.null()) for text, style, _ in rendered]).adjust_cell_length(width)

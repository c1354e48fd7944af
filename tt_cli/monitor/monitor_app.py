"""The full-screen view of `tt monitor`: five views over one scene, drawn when there is news.

What it shows is learned by `Watch` in threads beside it; nothing here waits for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Resize
from textual.filter import LineFilter
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Footer

from tt_cli.monitor import views
from tt_cli.monitor.peer_tables import LEADER_COLUMNS, PEER_COLUMNS, LeaderRow, PeerRow, leader_rows, others, peer_rows
from tt_cli.monitor.scene import DAY, EVER
from tt_cli.monitor.watch import SwarmWatch
from tt_cli.monitor.widgets import Lines, Moved, PeerTable
from tt_cli.terminal.ascii import asks_for_ascii, to_ascii
from tt_cli.terminal.format import clean, fit, left_right

VIEWS = ("overview", "peers", "leaderboard", "my peer", "log")
DRAW_SECONDS = 0.25  # between two looks for news
TICK_SECONDS = 1.0  # after which ages are drawn again though nothing is new
CHOICES: dict[str, tuple[int, Sequence[Any]]] = {
    "log_scale": (0, (False, True)),
    "last": (0, (None, 1000, 100)),  # of how many steps the loss is drawn
    "window": (2, (EVER, DAY)),
}
"""By attribute of the app: the view where it counts, and the values that its key goes through."""


class Terminal(LinuxDriver):
    """Draws on standard output: standard error may be a file, and libraries write to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = sys.__stdout__

    def _get_terminal_size(self) -> tuple[int, int]:
        """Of the terminal itself, whatever COLUMNS and LINES say: they do not change when it does."""
        with contextlib.suppress(OSError):
            width, height = os.get_terminal_size(sys.stdout.fileno() if self._file is None else self._file.fileno())
            if width and height:
                return width, height
        return super()._get_terminal_size()

    def look_at_size(self) -> None:
        """A change whose signal got lost is seen all the same."""
        width, height = self._get_terminal_size()
        if (width, height) != self._app.size:
            self._app.post_message(Resize(Size(width, height), Size(width, height)))


class Ascii(LineFilter):
    """Every character that such a terminal cannot show, as one that it can."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same cells in ASCII."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class Help(ModalScreen[None]):
    """The keys and the words. Any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,enter,space", "dismiss", "back to the view")]

    def compose(self) -> ComposeResult:
        """The text, which scrolls on a small terminal."""
        yield Lines(lambda width, height: views.help_lines(width), id="help")
        yield Footer(compact=True)


class MonitorApp(App[None]):
    """watch: what to show. interval: seconds between its looks."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; layers: base; }
    Help { background: ansi_default; }
    #title, #tabs, #alarm, #board { height: 1; background: ansi_default; overflow: hidden; }
    #alarm { display: none; }
    #detail { height: 2; overflow: hidden; }
    ContentSwitcher { height: 1fr; }
    Lines, Vertical, PeerTable { background: ansi_default; scrollbar-background: ansi_default; }
    Lines, PeerTable { scrollbar-size-vertical: 1; }
    #peers, #leaderboard { height: 1fr; }
    Lines { overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit", priority=True),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("tab", "next(1)", "next view", priority=True, key_display="Tab"),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        *(Binding(str(number), f"view({number - 1})", name, show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("l", "choose('log_scale')", "log scale"),
        Binding("n", "choose('last')", "steps"),
        Binding("d", "choose('window')", "today/ever"),
    ]

    def __init__(self, watch: SwarmWatch, interval: float) -> None:
        super().__init__(driver_class=Terminal, ansi_color=True)  # the colours of the person's own terminal
        self.theme = "ansi-dark"
        self._watch, self._patience = watch, max(10.0, 3 * interval)
        self._seen, self._drawn_at = -1, 0.0
        self.scene = watch.scene()
        self.view = 0
        self.log_scale, self.last, self.window = [values[0] for _, values in CHOICES.values()]
        self.ascii = asks_for_ascii(os.environ)

    # ---------------------------------------------------------------- what it is made of

    def compose(self) -> ComposeResult:
        """A title, the views' names, an alarm while something is wrong, a view, and the keys."""
        yield Lines(self._title, id="title")
        yield Lines(self._tabs, id="tabs")
        yield Lines(self._alarm, id="alarm")
        with ContentSwitcher(initial="view-0"):
            yield Lines(
                lambda *size: views.overview(self.scene, *size, last=self.last, log=self.log_scale), id="view-0"
            )
            with Vertical(id="view-1"):
                yield PeerTable[PeerRow](PEER_COLUMNS, lambda row: row.peer.peer_id, 3, id="peers")
                yield Lines(self._detail, id="detail")
            with Vertical(id="view-2"):
                yield Lines(self._board, id="board")
                yield PeerTable[LeaderRow](LEADER_COLUMNS, lambda row: row.leader.user, 2, id="leaderboard")
            yield Lines(lambda width, height: views.mine(self.scene, width), id="view-3")
            yield Lines(lambda width, height: views.log_lines(self.scene, width), id="view-4")
        yield Footer(compact=True, show_command_palette=False)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """With one for terminals without Unicode."""
        return [*super().get_line_filters(), *([Ascii()] if self.ascii else [])]

    def on_mount(self) -> None:
        """Begin to draw."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        for fixed in ("title", "tabs", "alarm", "detail", "board"):
            self.query_one(f"#{fixed}").can_focus = False
        self.set_interval(DRAW_SECONDS, self.draw)
        self.action_view(0)

    # ---------------------------------------------------------------- drawing

    def draw(self, *, at_once: bool = False) -> None:
        """Draw what is new, and everything once a second, for ages grow."""
        now, fresh = asyncio.get_running_loop().time(), at_once or self._watch.news != self._seen
        if not fresh and now < self._drawn_at + TICK_SECONDS:
            return
        base = next(iter(self.screen_stack), None)
        if base is None or not base.query("#alarm"):  # not made yet, or gone already
            return
        if isinstance(self._driver, Terminal) and not at_once:
            self._driver.look_at_size()
        self._seen, self._drawn_at = self._watch.news, now
        self.scene = self._watch.scene()
        alarm = base.query_one("#alarm", Lines)
        alarm.display = bool(self.scene.alarm(self._patience))
        alarm.styles.height = len(self._alarm(self.size.width, 0))
        for name in ("title", "tabs", "alarm", "detail", "board"):
            base.query_one(f"#{name}", Lines).update()
        if self.view == 2:
            rows = leader_rows(self.scene.leaders.get(self.window, []), self.scene.now)
            base.query_one("#leaderboard", PeerTable).show(rows)
        elif self.view != 1:
            base.query_one(f"#view-{self.view}", Lines).update()
        elif fresh:
            base.query_one("#peers", PeerTable).show(peer_rows(self.scene.snapshot))

    def on_moved(self, _: Moved) -> None:
        """The line below the peers is about another one."""
        self.screen_stack[0].query_one("#detail", Lines).update()

    def on_resize(self) -> None:
        """Another number of columns fits."""
        self.call_after_refresh(self.draw, at_once=True)

    def _title(self, width: int, height: int) -> list[Text]:
        run = self.scene.snapshot.run if self.scene.snapshot is not None else self.scene.run
        left = Text(f"tt monitor {clean(run)}", style="bold")
        return [left_right(left, Text(self.scene.identity, style="dim"), width)]

    def _tabs(self, width: int, height: int) -> list[Text]:
        line = Text()
        for number, name in enumerate(VIEWS):
            label = f" {number + 1} {name} " if width >= 64 else f"{number + 1} {name}" if number == self.view else ""
            label = label or f" {number + 1} "
            style = "reverse bold" if number == self.view else "dim"
            line.append(label, style=style).apply_meta({"@click": f"app.view({number})"}, -len(label))
            line.append(" ")
        return [fit(line, width)]

    def _alarm(self, width: int, height: int) -> list[Text]:
        words = self.scene.alarm(self._patience)
        return list(Text(words, style="bold red").wrap(self.console, max(1, width)))[:3] if words else [Text("")]

    def _detail(self, width: int, height: int) -> list[Text]:
        row: PeerRow | None = self.screen_stack[0].query_one("#peers", PeerTable).selected
        if row is None:
            return [Text("no peer is known", style="dim")]
        peer = row.peer
        facts = [*row.remarks, *others(peer), *([clean(peer.round)] if peer.round else [])]
        given = " (self-given)" if self._self_given() and peer.user else ""
        name = Text.assemble((row.name, "bold"), (f"{given}  {clean(peer.device)}  {clean(peer.peer_id)}", "dim"))
        return [fit(name, width), fit(Text(" · ".join(facts)), width)]

    def _self_given(self) -> bool:
        """True where nobody checks the names of peers."""
        return self.scene.snapshot is not None and not self.scene.snapshot.names_checked

    def _board(self, width: int, height: int) -> list[Text]:
        scene = self.scene
        window = "today" if self.window == DAY else "ever"
        if scene.past_from:
            words = f"{window}, as {clean(scene.past_from)} recorded it"
        elif scene.past_trouble:
            words = f"{window}: {clean(scene.past_trouble)}"
        elif self.window == DAY:
            words = "today: nobody records it; an aux peer's page does (--from URL)"
        else:
            words = "ever, as the peers that are here now tell it; an aux peer's page knows more (--from URL)"
        return [fit(Text(f"names are self-given; {words}" if self._self_given() else words, style="dim"), width)]

    # ---------------------------------------------------------------- keys

    def action_view(self, number: int) -> None:
        """Go to a view."""
        self.view = number
        self.screen.query_one(ContentSwitcher).current = f"view-{number}"
        self.draw(at_once=True)
        focus = {1: "#peers", 2: "#leaderboard"}.get(number, f"#view-{number}")
        self.screen.query_one(focus).focus()
        self.refresh_bindings()

    def action_next(self, step: int) -> None:
        """Go to the view after this one."""
        if len(self.screen_stack) == 1:
            self.action_view((self.view + step) % len(VIEWS))

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_choose(self, name: str) -> None:
        """Go to the next value of one of CHOICES."""
        values = CHOICES[name][1]
        setattr(self, name, values[(values.index(getattr(self, name)) + 1) % len(values)])
        self.draw(at_once=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys are shown where they do something."""
        if action == "choose" and CHOICES[str(parameters[0])][0] != self.view:
            return False
        return not (action in ("choose", "view", "help") and len(self.screen_stack) > 1)

"""Forms of output: a live view on a terminal, plain lines anywhere else, JSON lines on request."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

Mode = Literal["live", "plain", "json"]


def output_mode(stream: TextIO, *, plain: bool = False, json: bool = False) -> Mode:
    """Choose how to write to `stream`: live only on a terminal that can move its cursor and show Unicode."""
    if json:
        return "json"
    able = os.environ.get("TERM", "") not in ("", "dumb") and "utf" in (stream.encoding or "").lower()
    return "live" if stream.isatty() and able and not plain else "plain"


def write_line(stream: TextIO, line: str) -> None:
    """`line` and a newline, at once; characters that the stream cannot encode become "?"."""
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()


@contextmanager
def standard_error_in(file: Path) -> Iterator[None]:
    """Have what this process and its children write to standard error go to `file`: it would tear the screen."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, 2)
        os.close(target)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _lost_quietly() -> Iterator[None]:
    """Lines that a closed terminal or a full disk does not take end nobody's work."""
    try:
        yield
    except OSError as lost:
        if lost.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def clock(at: float) -> str:
    """Unix time as local HH:MM:SS."""
    return time.strftime("%H:%M:%S", time.localtime(at))


class LiveScreen:
    """A screen in the form that its stream can take; a context manager. Subclasses draw it in `frame`.

    On a terminal it is redrawn four times a second, where the terminal's lines end, by Rich's refresh thread, which
    holds Rich's lock: who holds `lock` must not call `print_above`. title, identity: what stands at the left and at the
    right of the first line. stream: standard output by default. plain, json: force that form.
    """

    def __init__(
        self, title: str, identity: str, *, plain: bool = False, json: bool = False, stream: TextIO | None = None
    ) -> None:
        self.stream = stream or sys.stdout
        self.mode = output_mode(self.stream, plain=plain, json=json)
        self.lock = threading.Lock()  # of what `frame` draws
        self.titles = Text(title, style="bold"), Text(identity, style="dim")
        self._console = Console(file=self.stream, highlight=False)
        self._above = ""
        self._size, self._height, self._afresh = self._console.size, 0, 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.mode == "live":
            self._live = Live(
                get_renderable=self._renderable, console=self._console, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        with _lost_quietly():
            if self._live is not None:
                self._live.stop()

    def write(self, line: str) -> None:
        """A line of plain or JSON output."""
        with _lost_quietly():
            write_line(self.stream, line)

    def frame(self, width: int, height: int, now: float) -> list[Text]:
        """Draw it as at most `height` lines of at most `width` cells. now: Unix seconds."""
        raise NotImplementedError

    def print_above(self, line: str) -> None:
        """A line above the view, in place of the last one; wrapped by the terminal itself, it can be copied as one."""
        self._above = f"{line}\n"
        self._console.print(Text(line, style="bold"), soft_wrap=True)

    def _renderable(self) -> Group:
        size = self._console.size
        if size != self._size:
            self._size, self._afresh = size, 2
        if self._afresh:
            self._start_afresh()
        above = 1 - (-len(self._above) // size.width)
        with self.lock:
            lines = self.frame(size.width, max(4, size.height - above), time.time())
        self._height = len(lines)
        return Group(*lines)

    def _start_afresh(self) -> None:
        # The terminal has reflowed what was drawn, so nobody knows where the view is. Clear all, and leave
        # the cursor as far below the lines above as Rich will move it up before it draws. Twice, for a view
        # that is higher than the new terminal scrolls the lines above away the first time.
        self._afresh -= 1
        self.stream.write(f"\x1b[H\x1b[2J{self._above}")
        self.stream.write("\n" * max(0, self._height - 1))
        self.stream.flush()

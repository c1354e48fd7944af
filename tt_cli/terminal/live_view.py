"""Forms of output: a live view on a terminal, plain lines anywhere else, JSON lines on request."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tt_cli.supervisor.events import Log
from tt_cli.terminal.format import plural

MOST_UNREAD = 2000  # pieces that wait for a reader
PATIENCE = 1.0  # seconds for one who is slow
Mode = Literal["live", "plain", "json"]


def output_mode(stream: TextIO, *, plain: bool = False, json: bool = False) -> Mode:
    """Choose how to write to `stream`: live only on a terminal that can move its cursor and show Unicode."""
    if json:
        return "json"
    able = os.environ.get("TERM", "") not in ("", "dumb") and "utf" in (stream.encoding or "").lower()
    return "live" if stream.isatty() and able and not plain else "plain"


def write_line(stream: TextIO, line: str, end: str = "\n") -> None:
    """`line` and a newline, at once; characters that the stream cannot encode become "?"."""
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "replace").decode(encoding) + end)
    stream.flush()


def _takes_some(stream: TextIO, seconds: float) -> bool:
    """Tell whether a stream takes anything, within so many seconds; one that is no file of the system's does."""
    try:
        return bool(select.select([], [stream], [], max(0.0, seconds))[1])
    except (OSError, ValueError):
        return True


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
        pieces = r".{1,60}|\n" if self.stream.isatty() else r"(?s).{1,1000}"  # what takes any takes it whole
        self._piece = r"(?s).+" if self.stream.seekable() else pieces  # a file takes a line, or on a full disk none
        self._unread, self._left_out = deque[str](), 0

    def __enter__(self) -> Self:
        if self.mode == "live":
            self._live = Live(
                get_renderable=self._renderable, console=self._console, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            if self._live is not None:
                self._live.stop()
            self._flush(PATIENCE)

    def write(self, line: str) -> None:
        """A line of plain or JSON output; lost where a closed terminal or a full disk does not take it.

        While nobody reads (`| less`, Ctrl-S), lines wait and most are left out: nobody's work shall.
        """
        patience = 0.0 if self._unread else PATIENCE
        if len(self._unread) < MOST_UNREAD and not self._left_out:
            self._unread += re.findall(self._piece, f"{line}\n")
        else:
            self._left_out += 1
        try:
            self._flush(patience)
        except OSError as lost:
            if lost.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise

    def _flush(self, patience: float) -> None:
        began = time.monotonic()
        while (self._unread or self._left_out) and _takes_some(self.stream, began + patience - time.monotonic()):
            patience = PATIENCE  # somebody reads
            if not self._unread:
                log = Log(f"{plural(self._left_out, 'line')} left out here: nobody read", "warning")
                self._left_out = 0
                plain = f"{clock(log.at)} {log.level:<12} {log.message}"
                self._unread.append(f"{log.to_json() if self.mode == 'json' else plain}\n")
            write_line(self.stream, self._unread.popleft(), end="")

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

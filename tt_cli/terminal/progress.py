"""Progress of long work, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tt_cli.terminal.live_view import output_mode, write_line

PLAIN_INTERVAL = 10.0  # seconds between two lines of progress without a terminal


@contextmanager
def progress(label: str, unit: str, lines: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield what to call with what is done and what there is to do. unit: "bytes", or what is counted, as a plural.

    lines: whether to write lines where there is no terminal.
    """
    begun = said = time.monotonic()

    def words(done: float, total: float) -> str:
        rate = done / max(time.monotonic() - begun, 1e-3)
        if unit == "bytes":
            return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        return f"{done:.0f} of {total:.0f} {unit}, {rate:.0f} {unit}/s"

    if output_mode(sys.stderr) == "live":
        columns = (TextColumn(label), BarColumn(), TextColumn("{task.fields[words]}, ETA"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None, words="…")
            yield lambda done, total: bar.update(task, completed=done, total=total, words=words(done, total))
        return

    def write(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if lines and (now - said >= PLAIN_INTERVAL or (unit == "bytes" and done == total)):
            said = now
            eta = f", ETA {(total - done) * (now - begun) / done:.0f} s" if 0 < done < total else ""
            write_line(sys.stderr, f"{label}: {words(done, total)}{eta}")

    yield write

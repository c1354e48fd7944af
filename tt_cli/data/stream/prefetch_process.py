"""The process that reads examples ahead, see `prefetch`: the plan on stdin, messages on stdout.

A message is a kind and its content in msgpack: a `Block`, a trouble and its remedy, or at last the error or the bug
that ended the reading. The process is run as a file: the package around it loads torch, which takes seconds and 200 MB.
"""

from __future__ import annotations

import itertools
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgpack


class Messages(queue.PriorityQueue[tuple[bool, int, bytes]]):
    """Messages on their way, at most `bound` of them: `put` waits for room. A thread of its own sends them in order."""

    def __init__(self, connection: Connection, bound: int) -> None:
        super().__init__(bound)
        self._connection, self._numbers = connection, itertools.count()
        threading.Thread(target=self._send, daemon=True).start()

    def add(self, kind: str, content: Any, urgent: bool = False) -> None:
        """Add a message. An urgent one overtakes all others."""
        self.put((not urgent, next(self._numbers), msgpack.packb((kind, content))))

    def _send(self) -> None:
        while True:
            *_, message = self.get()
            try:
                self._connection.send_bytes(message)
            except OSError:  # nobody reads any more
                os._exit(0)
            self.task_done()


def main(reader: str, parent: int, bound: int, memory: int) -> None:
    """Read by the plan on stdin until the parent ends. reader, memory: see `Plan`."""
    from tt_cli.errors import TTError
    from tt_cli.supervisor.processes import end_with

    end_with(parent)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connection = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    messages = Messages(connection, bound)
    try:
        import pyarrow

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        blocks: Callable[..., Iterator[Any]] = resolve_name(reader)
        plan = sys.stdin.buffer.read()
        for block in blocks(plan, lambda *trouble: messages.add("trouble", trouble, urgent=True)):
            messages.add("block", block)
    except TTError as error:
        messages.add("error", ([kind.__name__ for kind in type(error).__mro__], str(error)))
    except Exception:
        messages.add("bug", traceback.format_exc())
    messages.join()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""The process that reads examples ahead: `python prefetch_process.py PARENT BOUND`, plan on stdin, messages on stdout.

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

ROWS = 256  # of a message
MOST_MEMORY = 1 << 30  # bytes; a page of parquet of a few kilobytes can stand for gigabytes


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


def main(parent: int, bound: int) -> None:
    """Read by the plan on stdin until the parent ends."""
    from tt_cli.errors import TTError
    from tt_cli.supervisor.processes import end_with

    end_with(parent)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    connection = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    messages = Messages(connection, bound)
    try:
        import pyarrow

        from tt_cli.data.stream.plan import PLAN
        from tt_cli.data.stream.row_reader import RowReader

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        plan = PLAN.validate_json(sys.stdin.buffer.read())
        reader = RowReader(plan, lambda trouble, remedy: messages.add("trouble", (trouble, remedy), urgent=True))
        for block in reader.blocks():
            for part in block.parts(ROWS):
                messages.add("block", part.packed())
    except TTError as error:
        messages.add("error", ([kind.__name__ for kind in type(error).__mro__], str(error)))
    except Exception:
        messages.add("bug", traceback.format_exc())
    messages.join()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(int(sys.argv[1]), int(sys.argv[2]))

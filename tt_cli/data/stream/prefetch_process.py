"""The process that reads examples ahead: `python prefetch_process.py PARENT BOUND`, plan on stdin, messages on stdout.

A message is a kind and its content in msgpack: a `Block`, a trouble and its remedy, or at last the error or the bug
that ended the reading. The process is run as a file: the package around it loads torch, which takes seconds and 200 MB.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

ROWS = 256  # of a message


class MessageQueue:
    """A queue of messages, of at most `bound` bytes together (one message at least), sent by a thread of its own.

    broken: called by that thread when nobody reads any more.
    """

    def __init__(self, connection: Connection, bound: int, broken: Callable[[], None]) -> None:
        self._connection, self._bound, self._broken, self._held = connection, bound, broken, 0
        self._messages: collections.deque[bytes] = collections.deque()
        self._change = threading.Condition()
        threading.Thread(target=self._send, daemon=True).start()

    def put(self, kind: str, message: Any, urgent: bool = False) -> None:
        """Add a message; waits until there is room for it. An urgent one waits for nothing and overtakes all others."""
        content: bytes = msgpack.packb((kind, message))
        with self._change:
            if urgent:
                self._messages.appendleft(content)
            else:
                self._change.wait_for(lambda: self._held == 0 or self._held + len(content) <= self._bound)
                self._messages.append(content)
            self._held += len(content)
            self._change.notify_all()

    def drain(self) -> None:
        """Wait until all is sent."""
        with self._change:
            self._change.wait_for(lambda: self._held == 0)

    def _send(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._messages)
                content = self._messages.popleft()
            try:
                self._connection.send_bytes(content)
            except OSError:
                return self._broken()
            with self._change:
                self._held -= len(content)
                self._change.notify_all()


def main(parent: int, bound: int) -> None:
    """Read by the plan on stdin until the parent ends."""
    from tt_cli.errors import TTError
    from tt_cli.supervisor.processes import end_with

    end_with(parent)
    connection = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    messages = MessageQueue(connection, bound, lambda: os._exit(0))
    try:
        import pyarrow

        from tt_cli.data.stream.plan import PLAN
        from tt_cli.data.stream.row_reader import RowReader

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        plan = PLAN.validate_json(sys.stdin.buffer.read())
        reader = RowReader(plan, lambda trouble, remedy: messages.put("trouble", (trouble, remedy), urgent=True))
        for block in reader.blocks():
            for part in block.parts(ROWS):
                messages.put("block", part.packed())
    except TTError as error:
        messages.put("error", (error.exit_code, str(error)))
    except Exception:
        messages.put("bug", traceback.format_exc())
    messages.drain()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The process that reads examples ahead: `python prefetch_process.py PARENT BOUND`, a plan on stdin, frames on stdout.

It is run as a file: the package around it loads torch, which takes seconds and 200 MB, and nothing here needs it.
"""

from __future__ import annotations

import collections
import json
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 256  # of a frame
LENGTHS = struct.Struct("<II")  # bytes of a frame's header, and of the codes after it


class Frames:
    """A queue of frames, of at most `bound` bytes together (one frame at least), written by a thread of its own.

    broken: called by that thread when nobody reads any more.
    """

    def __init__(self, descriptor: int, bound: int, broken: Callable[[], None]) -> None:
        self._descriptor, self._bound, self._broken, self._held = descriptor, bound, broken, 0
        self._frames: collections.deque[bytes] = collections.deque()
        self._change = threading.Condition()
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, header: dict[str, Any], codes: bytes = b"", urgent: bool = False) -> None:
        """Add a frame; waits until there is room for it. An urgent one waits for nothing and overtakes all others."""
        text = json.dumps(header).encode()
        frame = LENGTHS.pack(len(text), len(codes)) + text + codes
        with self._change:
            if urgent:
                self._frames.appendleft(frame)
            else:
                self._change.wait_for(lambda: self._held == 0 or self._held + len(frame) <= self._bound)
                self._frames.append(frame)
            self._held += len(frame)
            self._change.notify_all()

    def drain(self) -> None:
        """Wait until all is written."""
        with self._change:
            self._change.wait_for(lambda: self._held == 0)

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._frames)
                frame = self._frames.popleft()
            rest = memoryview(frame)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return self._broken()
            with self._change:
                self._held -= len(frame)
                self._change.notify_all()


def main(parent: int, bound: int) -> None:
    """Read by the plan on stdin until the parent ends."""
    from tt_cli.data.end_with import end_with

    end_with(parent)
    if os.getppid() != parent:
        os._exit(0)
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    frames = Frames(out, bound, lambda: os._exit(0))
    try:
        stream(sys.stdin.read(), frames)
    except Exception as error:
        from tt_cli.errors import TTError

        if isinstance(error, TTError):
            frames.put({"failure": str(error), "exit_code": error.exit_code})
        else:
            frames.put({"bug": traceback.format_exc()})
    frames.drain()


def stream(plan: str, frames: Frames) -> None:
    """Write what a reader reads. Ends with an error alone."""
    import pyarrow

    from tt_cli.data.stream.plan import ReadPlan
    from tt_cli.data.stream.row_reader import RowReader

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)

    def tell(words: str, remedy: str) -> None:
        frames.put({"trouble": words, "remedy": remedy}, urgent=True)

    reader = RowReader(ReadPlan.from_json(plan), tell)
    for block in reader.blocks():
        counts, state = block.counts, reader.state(block.position)
        for start in range(0, max(1, len(block.captions)), ROWS):
            state = {**state, "position": {**state["position"], "taken": block.position.taken + start}}
            captions, codes = block.captions[start : start + ROWS], block.codes[start : start + ROWS]
            frames.put({"captions": captions, "counts": counts, "state": state}, codes.astype("<i2").tobytes())
            counts = {}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(int(sys.argv[1]), int(sys.argv[2]))

"""Examples that another process reads ahead, so that the training process only takes them.

The process is a program of its own (not a fork: no lock, no CUDA and no p2p daemon comes with it), loads neither torch
nor hivemind, and ends with its parent. It sends blocks through a pipe. It holds PREFETCH_BLOCKS at most and then waits;
nobody polls, and there is no thread here.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgpack
from pydantic import TypeAdapter

from tt_cli.data.stream.plan import Plan
from tt_cli.data.stream.row_reader import Block
from tt_cli.data.stream.shard_locations import NoSplit
from tt_cli.errors import TTError, UsageError

PREFETCH_BLOCKS = 24  # some 16 MB at the paper's sizes
STARTS = 3  # of the process, when it ends before it gave anything
ERRORS = {kind.__name__: kind for kind in (NoSplit, UsageError, TTError)}
PROGRAM = Path(__file__).with_name("prefetch_process.py")
ENVIRONMENT = {  # memory that stays flat: one arena, no allocator that keeps what it has, and `datasets` without torch
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "USE_TORCH": "0",
}


class Prefetch:
    """The process that reads ahead; close it. on_trouble: hears a trouble and a remedy, in `next`.

    bound: blocks that it may hold. A process that is ended by something else is started again, with its last state.
    """

    def __init__(self, plan: Plan, on_trouble: Callable[[str, str], None], bound: int = PREFETCH_BLOCKS) -> None:
        self._plan, self._on_trouble, self._bound = plan, on_trouble, bound
        self._owner, self._ended_early = os.getpid(), 0
        self._process, self._messages = self._start()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    @property
    def pid(self) -> int:
        """Of the process that reads."""
        return self._process.pid

    def next(self) -> Block:
        """The next examples; waits for them. Raises TTError when there will be none."""
        while True:
            if self._messages.closed:
                raise TTError("the data stream was closed")
            try:
                message = msgpack.unpackb(self._messages.recv_bytes())
            except (EOFError, OSError):
                self._restart()
                continue
            match message:
                case "block", content:
                    self._ended_early = 0
                    block = Block.unpacked(content)
                    self._plan = replace(self._plan, state=block.state_after(len(block.captions)))
                    return block
                case "trouble", (trouble, remedy):
                    self._on_trouble(trouble, remedy)
                case "error", (names, words):
                    self.close()
                    raise next(ERRORS[name] for name in names if name in ERRORS)(words)
                case _, bug:
                    self.close()
                    raise RuntimeError(f"in the process that reads ahead:\n{bug}")

    def close(self) -> None:
        """End the process. Can be called twice; a fork of this process that calls it ends nothing."""
        if os.getpid() == self._owner and self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._messages.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        plan, (receiver, sender) = self._plan, multiprocessing.Pipe(duplex=False)
        with sender:
            process = subprocess.Popen(
                [sys.executable, "-P", *map(str, (PROGRAM, plan.reader, os.getpid(), self._bound, plan.memory))],
                stdin=subprocess.PIPE,
                stdout=sender.fileno(),
                env={**os.environ, **ENVIRONMENT},
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended; `next` finds out
            process.stdin.write(TypeAdapter(type(plan)).dump_json(plan))
        return process, receiver

    def _restart(self) -> None:
        code = self._process.wait()
        how = f"ended by signal {-code}" if code < 0 else f"ended ({code})"
        self._ended_early += 1
        if self._ended_early > STARTS:
            raise TTError(
                f"the process that reads the data was {how}, {STARTS + 1} times: free some memory, or see the log"
            )
        self._on_trouble(f"the process that reads the data was {how}", "starts another one, which goes on")
        self.close()
        self._process, self._messages = self._start()

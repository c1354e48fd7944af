"""Examples that another process reads ahead, so that the training process only takes them.

The process is a program of its own (not a fork: no lock, no CUDA and no p2p daemon comes with it), loads neither torch
nor hivemind, and ends with its parent. It writes frames to a pipe: two lengths, a JSON header, the codes. It holds
PREFETCH_BYTES at most and then waits; nobody polls, and there is no thread here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tt_cli.data.codes import CODE_DTYPE
from tt_cli.data.stream.plan import ReadPlan
from tt_cli.data.stream.prefetch_process import LENGTHS
from tt_cli.errors import TTError, UsageError

PREFETCH_BYTES = 16 << 20
STARTS = 3  # of the process, when it ends before it gave anything
PROGRAM = Path(__file__).with_name("prefetch_process.py")


@dataclass
class Chunk:
    """Some examples that were read ahead."""

    captions: list[str]
    codes: np.ndarray  # (k, n) int16
    state: dict[str, Any]  # to go on with at the first of them, see `state_after`
    counts: dict[str, int]  # of rows that were left out since the last chunk

    def state_after(self, count: int) -> dict[str, Any]:
        """The state to go on with after the first `count` examples."""
        position = self.state["position"]
        return {**self.state, "position": {**position, "taken": position["taken"] + count}}


class Prefetch:
    """A context manager over the process that reads ahead. tell: hears words and a remedy, in `next`.

    bound: bytes that it may hold. A process that is ended by something else is started again, where it was.
    """

    def __init__(self, plan: ReadPlan, tell: Callable[[str, str], None], bound: int = PREFETCH_BYTES) -> None:
        self._plan, self._tell, self._bound = plan, tell, bound
        self._owner, self._ended_early = os.getpid(), 0
        self._process = self._start()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    @property
    def pid(self) -> int:
        """Of the process that reads."""
        return self._process.pid

    def next(self) -> Chunk:
        """The next examples; waits for them. Raises TTError when there will be none."""
        while True:
            header, codes = self._read_frame()
            if header is None:
                self._restart()
            elif "trouble" in header:
                self._tell(header["trouble"], header["remedy"])
            elif "failure" in header:
                self.close()
                raise (UsageError if header["exit_code"] == UsageError.exit_code else TTError)(header["failure"])
            elif "bug" in header:
                self.close()
                raise RuntimeError(f"in the process that reads ahead:\n{header['bug']}")
            else:
                self._ended_early = 0
                rows = np.frombuffer(codes, dtype=CODE_DTYPE).reshape(-1, self._plan.rules.codes)
                chunk = Chunk(header["captions"], rows, header["state"], header["counts"])
                self._plan = replace(self._plan, state=chunk.state_after(len(chunk.captions)))
                return chunk

    def close(self) -> None:
        """End the process. Can be called twice; a fork of this process that calls it ends nothing."""
        if os.getpid() == self._owner and self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            # Memory that stays flat: one arena, and no allocator that keeps what it has.
            "MALLOC_ARENA_MAX": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(os.getpid()), str(self._bound)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(self._plan.to_json().encode())
            process.stdin.close()
        except BrokenPipeError:  # it has ended; `next` finds out
            pass
        return process

    def _restart(self) -> None:
        code = self._process.wait()
        how = f"ended by signal {-code}" if code < 0 else f"ended ({code})"
        self._ended_early += 1
        if self._ended_early > STARTS:
            raise TTError(
                f"the process that reads the data was {how}, {STARTS + 1} times: free some memory, or see the log"
            )
        self._tell(f"the process that reads the data was {how}", "starts another one, which goes on there")
        self.close()
        self._process = self._start()

    def _read_frame(self) -> tuple[dict[str, Any] | None, bytes]:
        """A header and codes; None where the process has ended."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            raise TTError("the data stream was closed")
        lengths = self._process.stdout.read(LENGTHS.size)
        if len(lengths) < LENGTHS.size:
            return None, b""
        head, body = LENGTHS.unpack(lengths)
        header, codes = self._process.stdout.read(head), self._process.stdout.read(body)
        if len(header) < head or len(codes) < body:
            return None, b""
        return json.loads(header), codes

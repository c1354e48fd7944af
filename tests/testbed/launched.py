"""A process that prints one JSON object a line: started, followed, and ended with all that it started."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tt_cli.supervisor.worker_process import SHARING

ROOT = Path(__file__).resolve().parents[2]
LEAVE_SECONDS = 15.0
Line = dict[str, Any]


class Launched:
    """`python -m module arguments…`, in a process group of its own; its other output goes to the file `log`.

    lines: the objects it printed so far, each with the time it came ("at", Unix time) unless it says one. It gets
    "leave" on standard input when it should end. Start it from a thread that lives as long as it should.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[object], log: Path, environment: dict[str, str] | None = None
    ):
        self.name, self.log = name, log
        self.lines: list[Line] = []
        self._news = threading.Condition()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,  # no session of its own: what raises this script's priority raises its peers'
                env={**SHARING, **os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process itself; the group has the same number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def of(self, kind: str) -> list[Line]:
        """Its lines of one kind, oldest first."""
        return [line for line in list(self.lines) if line.get("kind") == kind]

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition` is true, looking after every line. If not, end the script with the log's end."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0 or (not self.running and not self._reader.is_alive()):
                    tail = self.log.read_text(errors="replace")[-3000:]
                    sys.exit(f"{self.name} did not reach {what} (after {seconds - left:.0f} s)\n{tail}")
                self._news.wait(timeout=min(left, 1.0))

    def go(self) -> None:
        """Let one that was started with --wait-for-go begin to train."""
        self._say(b"go\n")

    def leave(self) -> None:
        """Ask it to end; does not wait."""
        self._say(b"leave\n")

    def _say(self, command: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(command)
            self._process.stdin.flush()

    def close(self) -> None:
        """Have it leave, and end it when it does not."""
        self.leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and its group at once, and wait."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    with self._news:
                        self.lines.append({"at": time.time(), **line})
                        self._news.notify_all()
        with self._news:
            self._news.notify_all()


def tell(kind: str, **facts: Any) -> None:
    """In the launched process: print one line."""
    tell_line(json.dumps({"kind": kind, "at": time.time(), **facts}))


def tell_line(line: str) -> None:
    """In the launched process: print one line of JSON. Safe from any thread and from forked processes."""
    os.write(1, line.encode() + b"\n")  # whole, unlike what print writes


class Commands:
    """In the launched process: what standard input says. Make it before other processes are forked.

    go: "go" came. ended: "leave" came, or the end of the input; then `go` is set too.
    """

    def __init__(self) -> None:
        self.go, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        # Not through sys.stdin: its lock, held while reading, would hang forked processes, which close it first.
        received = b""
        while b"leave\n" not in received and (data := os.read(0, 4096)):
            received += data
            if b"go\n" in received:
                self.go.set()
        self.ended.set()
        self.go.set()


def peer_arguments(description: str | None) -> argparse.ArgumentParser:
    """What peers with a simulated device are told, ours and the baseline's."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="dalle", help="run whose model's shapes and optimizer are used")
    parser.add_argument("--part", type=float, default=1.0, help="part of the rows of large tensors to keep")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--initial-peer", action="append", default=[], help="multiaddr of a peer; may be repeated")
    parser.add_argument("--client-mode", action="store_true", help="accept no connections")
    parser.add_argument("--steps", type=int, default=0, help="say 'done' after so many global steps; 0: never")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples in a micro-batch")
    parser.add_argument("--micro-batch-seconds", type=float, default=1.0, help="time of the simulated device for it")
    parser.add_argument("--target-batch-size", type=int, default=256, help="samples of all peers for a global step")
    parser.add_argument("--seed", type=int, default=0, help="of the gradients")
    parser.add_argument("--matchmaking-time", type=float, default=5.0)
    parser.add_argument("--averaging-timeout", type=float, default=180.0)
    parser.add_argument("--next-chunk-timeout", type=float, default=20.0)
    parser.add_argument("--wait-for-go", action="store_true", help="train only when standard input says 'go'")
    parser.add_argument("--parameters", default="", help="file that receives the parameters after --steps")
    return parser

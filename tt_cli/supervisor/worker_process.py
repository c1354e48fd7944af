"""The supervisor's end: start a worker, follow its events, end it and all it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Event, Failure, from_json

# Tensors cross process borders as file descriptors. The other way, named files, needs a daemon of torch's for each
# process, which lives in a session of its own and outlives a killed peer by seconds.
SHARING = {"HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor"}

MOST_LOG = 1 << 24  # bytes
LOG_SECONDS = 60.0  # between two looks at it


class NotStarted(TTError):
    """No process is to be had: memory or the disk may be full, which may pass."""


class Worker:
    """One worker process in a process group of its own.

    module: its `main` is called, see `run_worker`. options: handed over as JSON (no secrets: other
    users of the machine can read a command line). log: file that receives what the worker and its libraries print; see
    `shorten`. launch: starts a process, as subprocess.Popen does.
    Start it from the main thread: the kernel ends it when the starting thread ends. Raises NotStarted.
    """

    def __init__(
        self,
        module: str,
        options: dict[str, Any],
        log: Path,
        environment: dict[str, str] | None = None,
        launch: Callable[..., Any] = subprocess.Popen,
    ):
        self.log = log
        reading, writing = os.pipe()
        try:
            with contextlib.suppress(OSError):  # a full disk may have room for a line, and none for another log
                shorten(log)
            with log.open("ab") as output:
                log.chmod(0o600)
                self._process = launch(
                    [sys.executable, "-m", "tt_cli.supervisor.reporter", module, str(writing), json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writing,),
                    start_new_session=True,
                    env={**SHARING, **os.environ, **(environment or {})},
                )
        except OSError as error:
            os.close(reading)
            words = f"cannot start a worker process with its log in {log}: {error.strerror or error}"
            raise NotStarted(words) from error
        finally:
            os.close(writing)
        self.failure: Failure | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._told_all = False
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        self._gone = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()
        threading.Thread(target=self._watch_log, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id; also the id of the worker's process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Its events as they come, until the worker has ended or nothing came for `timeout` seconds."""
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                return
            if event is None:
                self._events.put(None)
                return
            yield event

    @property
    def ended(self) -> bool:
        """True when the process is gone and all its events have been read."""
        return self._told_all and self._events.qsize() <= 1

    def leave(self) -> None:
        """Ask it to leave cleanly."""
        self._order("leave")

    def finish(self, wanted: bool) -> None:
        """Ask it to leave after the current global step, or take that back."""
        self._order("finish" if wanted else "stay")

    def hold(self, reason: str) -> None:
        """Ask it to compute nothing and stay in the swarm; without a reason, to go on."""
        self._order(f"hold {' '.join(reason.split())}" if reason else "go on")

    def _order(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end. Returns its exit code, None when `timeout` seconds were not enough."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            self._reader.join(timeout=2.0)
        return self._process.poll()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                with contextlib.suppress(ValueError):
                    event = from_json(line)
                    if isinstance(event, Failure):
                        self.failure = event
                    self._events.put(event)

    def _wait(self) -> None:
        """End what a worker leaves behind; that also closes the event pipe, after which nothing comes."""
        self._process.wait()
        self._gone.set()
        self.kill()
        self._reader.join()
        self._events.put(None)
        self._told_all = True
        with contextlib.suppress(ChildProcessError):  # they are this process's now where it is a container's first
            while True:
                os.waitpid(-self._process.pid, 0)

    def _watch_log(self) -> None:
        while not self._gone.wait(LOG_SECONDS):
            with contextlib.suppress(OSError):
                shorten(self.log)


def shorten(log: Path) -> None:
    """Begin a log of more than MOST_LOG anew, the old one beside it as `.1`; whoever writes to it goes on."""
    if log.is_file() and log.stat().st_size > MOST_LOG:
        shutil.copy(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)

"""`tt aux-peer` itself, as an organiser starts it: the supervisor with all its parts, seen through its JSON events."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tt_cli.run import RunConfig

SECONDS = 240.0


def free_port() -> int:
    """A TCP port of loopback that nothing listens on now, and that Linux hands out to nobody who asks for any."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))) as server,
        ):
            return int(server.getsockname()[1])


class AuxCommand:
    """A context manager. home: its TT_HOME. host: the address of the coordinator.

    Leaving it ends the command as Ctrl-C would, and with force if need be.
    """

    def __init__(self, run: RunConfig, home: Path, *flags: str, host: str = "127.0.0.1", **environment: str):
        self.name = home.name
        home.mkdir(mode=0o700, exist_ok=True)
        file = home / "run.toml"
        file.write_text(run.to_toml())
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._errors = (home / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tt_cli.cli.main", "aux-peer", str(file), "--json", "--host", host, *flags],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TT_HOME": str(home), "HF_HOME": str(home / "hf"), **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._errors.close()

    @property
    def pid(self) -> int:
        """Of the command, from which all its parts descend."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once; the parts end with it."""
        self._process.kill()
        self._process.wait()

    @property
    def addresses(self) -> list[str]:
        """Of the coordinator, when it listens."""
        self.need(lambda: bool(self.of("listening")), "the coordinator to listen")
        return list(self.of("listening")[-1]["addresses"])

    def page(self, port: int, path: str) -> dict[str, Any]:
        """What its web server answers, {} while it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one kind, oldest first."""
        return [event for event in list(self.events) if event["kind"] == kind]

    def said(self, words: str) -> list[str]:
        """Lines that hold these words."""
        return [event["message"] for event in self.of("log") if words in event["message"]]

    def need(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it, or fail with all that was said."""
        deadline = time.monotonic() + SECONDS
        with self._news:
            while not condition():
                if time.monotonic() > deadline or self._process.poll() is not None:
                    told = "\n".join(json.dumps(e)[:300] for e in self.events if e["kind"] not in ("snapshot",))
                    self._errors.seek(0)
                    raise AssertionError(f"not within {SECONDS:.0f} s: {what}\n{told}\n{self._errors.read()}")
                self._news.wait(timeout=0.5)

    def part(self, module: str) -> int:
        """Process id of the part that runs this module now, 0 without one."""
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == self._process.pid and module.encode() in words:
                return int(folder.name)
        return 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()

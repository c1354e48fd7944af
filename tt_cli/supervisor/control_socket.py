"""Control of a running supervisor by `tt status`, `pause`, `resume` and `finish`: a Unix socket in the run's folder.

One line of JSON each way, {"command": "pause", "seconds": 7200} and {"ok": true, "words": "…"}. The socket lies in a
folder that its owner alone may enter, and answers that user alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tt_cli.errors import TTError, os_errors

SECONDS = 5.0
LONGEST = 1 << 20  # bytes of a line
Answer = dict[str, Any]


class NotRunning(TTError):
    """Nobody listens at a socket: no such peer runs."""

    exit_code = 3


class NoAnswer(TTError):
    """Somebody listens and says nothing: the supervisor is stopped, or hangs."""


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """`path` in a form that is short enough for a socket's address (107 bytes), however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def answering(path: Path, answer: Callable[[Answer], Answer]) -> Iterator[None]:
    """Answer requests at `path`, from a thread of its own, until the end of the block. Raises TTError.

    answer: request → answer, called by that thread. Its errors of the kind TTError become {"ok": false, "words": …}.
    What lies at `path` is replaced: whoever enters this holds the lock beside it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        with os_errors(f"cannot make the control socket {path}"):
            path.unlink(missing_ok=True)
            os.fchmod(listening.fileno(), 0o600)  # before it has a name that another could open
            with _reachable(path) as address:
                listening.bind(address)
            listening.listen(8)
        threading.Thread(target=_serve, args=(listening, answer), name="control", daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread up, which ends
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _serve(listening: socket.socket, answer: Callable[[Answer], Answer]) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(SECONDS)
            if _user_of(connection) != os.getuid():
                continue
            request = _read_line(connection)
            try:
                answered = answer(request)
            except TTError as error:
                answered = {"ok": False, "words": str(error)}
            connection.sendall(json.dumps(answered).encode() + b"\n")


def ask(path: Path, request: Answer, seconds: float = SECONDS) -> Answer:
    """The answer of the supervisor that listens at `path`. Raises NotRunning, NoAnswer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        try:
            with _reachable(path) as address:
                connection.connect(address)
        except BlockingIOError as error:  # more wait there than may: nobody takes them
            raise NoAnswer(f"the supervisor at {path} does not answer") from error
        except OSError as error:
            raise NotRunning(f"no peer listens at {path}: {error.strerror or error}") from error
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return _read_line(connection)
        except (OSError, ValueError) as error:
            raise NoAnswer(f"the supervisor at {path} does not answer: {error}") from error


def _user_of(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _read_line(connection: socket.socket) -> Answer:
    """One object in one line. Raises ValueError for anything else, OSError when it does not come."""
    with connection.makefile("rb") as stream:
        received = stream.readline(LONGEST)
    if not received.endswith(b"\n"):
        raise ValueError("it hung up")
    line = json.loads(received)
    if not isinstance(line, dict):
        raise ValueError("not an object")
    return line

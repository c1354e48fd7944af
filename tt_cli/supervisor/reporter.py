"""The worker's end of supervision: what a worker process does first, and how it reports.

A worker is started by `worker_process.Worker`. Its events go out through a pipe of their own; commands come
in on standard input, one a line. It dies with its supervisor, and everything it forks dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Emit, Event, Failure, Finished

PR_SET_PDEATHSIG = 1
BUG_EXIT_CODE = 70


class Orders:
    """Wishes of the supervisor to this worker; to be read from any thread.

    leave: end within seconds. finish: end after the current global step; it may be taken back. hold: why this worker
    should compute nothing and stay in the swarm, "" when it should work.
    """

    def __init__(self) -> None:
        self.leave, self.finish = threading.Event(), threading.Event()
        self.hold = ""

    def take(self, line: str) -> None:
        """Follow one line: "leave", "finish", "stay" (no finish), "hold REASON", "go on". Others are ignored."""
        word, _, rest = line.strip().partition(" ")
        if word == "leave":
            self.leave.set()
        elif word == "finish":
            self.finish.set()
        elif word == "stay":
            self.finish.clear()
        elif word == "hold":
            self.hold = rest or "on request"
        elif (word, rest) == ("go", "on"):
            self.hold = ""

    def leave_at_once(self, before: Sequence[Callable[[], object]] = ()) -> Callable[[], object]:
        """End the process when it is asked to leave, whatever it does: for what may take minutes and can be redone.

        before: called then. Returns what to call when there is something to lose: it has to leave by itself from then.
        """
        begun = threading.Lock()

        def leave() -> None:
            self.leave.wait()
            if begun.acquire(blocking=False):
                try:
                    for each in before:
                        each()
                finally:
                    os._exit(0)

        threading.Thread(target=leave, daemon=True).start()
        return begun.acquire


class WorkerBroken(TTError):
    """Something that this worker needs died under it; a new worker process can go on."""

    exit_code = 75


def die_with_parent() -> None:
    """Have the kernel kill this process, and those it forks, when its parent ends (Linux).

    Without this, hivemind's processes outlive a killed trainer and even join later rounds.
    """
    libc, known = ctypes.CDLL(None, use_errno=True), {"parent": os.getppid()}

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != known["parent"]:  # it ended before the kernel was told
            os._exit(1)

    arm()
    os.register_at_fork(before=lambda: known.update(parent=os.getpid()), after_in_child=arm)


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this user have: shared tensors and connections are files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def reporter(descriptor: int) -> Emit:
    """What writes events to the supervisor's pipe, whole lines from any thread."""
    pipe, lock = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1), threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            pipe.write(event.to_json() + "\n")

    return emit


def run_worker(main: Callable[[dict[str, Any], Emit, Orders], None]) -> NoReturn:
    """Run `main(options, emit, orders)` under a supervisor, and end the process with its exit code.

    `orders.leave` is set also when the supervisor is gone: `main` then ends by itself within seconds.
    """
    descriptor, options = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    die_with_parent()
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    emit, orders = reporter(descriptor), Orders()
    signal.signal(signal.SIGTERM, lambda *_: orders.leave.set())
    threading.Thread(target=_follow_commands, args=(orders,), daemon=True).start()
    code = 0
    try:
        main(options, emit, orders)
    except TTError as error:
        code = error.exit_code
        emit(Failure(str(error), code))
    except BrokenPipeError:  # the supervisor is gone; nobody is left to tell
        code = 1
    except Exception as error:  # a bug: the traceback goes to the worker's log, one line to the person
        code = BUG_EXIT_CODE
        emit(Failure(f"{type(error).__name__}: {error}", code))
        with contextlib.suppress(OSError):  # of a full disk
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # hivemind's threads and futures may block a normal exit


def run_module(name: str) -> NoReturn:
    """Run the `main` of a module so. It may take long to load: asked to leave meanwhile, the process ends at once."""

    def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
        begin = orders.leave_at_once([lambda: emit(Finished("left"))])
        module = importlib.import_module(name)
        begin()
        module.main(options, emit, orders)

    run_worker(main)


def _follow_commands(orders: Orders) -> None:
    # Not through sys.stdin: its lock, held while reading, would hang forked processes, which close it first.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
        orders.take(line.decode(errors="replace"))
    orders.leave.set()


if __name__ == "__main__":
    # With MODULE DESCRIPTOR OPTIONS. That module meets this one under its own name, which __main__ is not.
    importlib.import_module("tt_cli.supervisor.reporter").run_module(sys.argv.pop(1))

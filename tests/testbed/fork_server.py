"""A fork server: peers of tests begin as forks of one process that has imported torch, hivemind and the peer once.

Imports and compiled kernels take a peer four seconds of a core, more than a tiny model's whole run. What a fork runs is
what `python -m MODULE` would: in a session, with an environment, streams and a log of its own, in the network namespace
of the thread that asks. Processes with another Hub or path (read when libraries are imported) start the usual way.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from typing import Any

PRELOADED = (
    *("hivemind", "testbed.peer", "tt_cli.auxiliary.coordinator", "tt_cli.swarm.collaboration"),
    "torch.fx.experimental.symbolic_shapes",  # which a backward pass imports
    *("pandas", "pyarrow.dataset", "pyarrow.parquet", "tokenizers"),  # which they import when they read data
    *("hivemind.utils.multiaddr.codecs.fspath", "hivemind.utils.multiaddr.codecs.ip4"),  # when they tell an address
)
READ_AT_IMPORT = ("HF_", "HIVEMIND_", "OMP_NUM_THREADS", "PYTHON")
MOST = 1 << 20  # bytes of a request


class Forked:
    """A peer's process, as subprocess.Popen shows one. stdin: a pipe to it."""

    def __init__(self, server: ForkServer, pid: int, stdin: Any):
        self._server, self.pid, self.stdin = server, pid, stdin
        self._descriptor = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if (code := self._ended(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a fork", timeout)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._readable(timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._server.ask({"reap": self.pid})
                    os.close(self._descriptor)
        return self.returncode

    def _readable(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))


class ForkServer:
    """Starts the process that forks, and asks it for forks. It ends with the process that started it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor",
        }
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=self._environment)
        theirs.close()

    def launch(
        self, command: list[str], *, stdin: int, stdout: Any, stderr: Any, pass_fds: tuple[int, ...], **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        """Start `python -m MODULE ARGUMENTS…`; takes what subprocess.Popen takes."""
        environment: dict[str, str] = options["env"]
        if not self._serves(environment):
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, **options)
        assert command[:2] == [sys.executable, "-m"] and stdin == subprocess.PIPE and options["start_new_session"]
        reading, writing = os.pipe()
        descriptors = {0: reading, 1: stdout.fileno(), 2: stderr.fileno(), **{number: number for number in pass_fds}}
        request = {"module": command[2], "arguments": command[3:], "environment": environment, "at": list(descriptors)}
        request["folder"] = str(options.get("cwd") or os.getcwd())
        with open("/proc/thread-self/ns/net") as namespace:
            try:
                pid = self.ask(request, [namespace.fileno(), *descriptors.values()])
            finally:
                os.close(reading)
        return Forked(self, pid, os.fdopen(writing, "wb"))

    def preload(self, module: str) -> None:
        """Import what later forks need and most do not."""
        self.ask({"import": module})

    def _serves(self, environment: dict[str, str]) -> bool:
        def read(given: dict[str, str]) -> dict[str, str]:
            return {name: value for name, value in given.items() if name.startswith(READ_AT_IMPORT)}

        return read(environment) == read(self._environment)

    def ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> int:
        """The server's answer: a new process id, or the exit code of one that has ended."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors or [])
            return int(self._control.recv(64))


@functools.cache
def fork_server() -> ForkServer:
    """The one of this test process."""
    return ForkServer()


def serve(control: socket.socket) -> None:
    """Answer requests until nobody is left to ask; in a fork, run what it is to be."""
    from tt_cli.optim.kernels import warm_up
    from tt_cli.supervisor.processes import keep_objects_shared
    from tt_cli.swarm.allreduce.clipping import centered_clip
    from tt_cli.swarm.compression import linear8

    for name in PRELOADED:
        importlib.import_module(name)
    warm_up(blockwise=False)
    linear8.implementation()
    centered_clip.implementation()
    keep_objects_shared()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MOST, 16)
        if not message:
            return
        request = json.loads(message)
        if "import" in request:
            importlib.import_module(request["import"])
            control.send(b"0")
        elif "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
        elif pid := os.fork():
            control.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            control.close()
            become(request, *descriptors)


def become(request: dict[str, Any], namespace: int, *descriptors: int) -> None:
    """Run a module as `python -m` does. Ends with SystemExit, as it does."""
    import numpy
    from hivemind.utils.asyncio import _AsyncContextWrapper
    from hivemind.utils.mpfuture import MPFuture

    # Locks that hivemind made when it was imported: a fork that is killed with one would hang all others.
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
    if not os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
        assert ctypes.CDLL(None).setns(namespace, 0) == 0, "cannot enter the network namespace"
    os.close(namespace)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for given, wanted in zip([os.dup2(each, 500 + each) for each in descriptors], request["at"], strict=True):
        os.dup2(given, wanted)
        os.close(given)
    for descriptor in set(descriptors) - set(request["at"]):
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    numpy.random.seed(int.from_bytes(os.urandom(4), "little"))  # Python's own is seeded anew by a fork
    warnings.filterwarnings("ignore", "'tt_cli.*' found in sys.modules", RuntimeWarning)  # it was preloaded
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))

"""Calls in processes of their own: what the Hub's libraries read when they are imported is read there anew.

Each such process is a fork of one that has imported torch, what transformers, datasets and peft import beside it, and
what commands do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

Call = Callable[..., "Future[Any]"]
TIMEOUT = 240.0  # an upper bound for a busy machine
PRELOADED = [
    *("__main__", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("scipy.optimize", "pandas", "pyarrow.dataset", "pyarrow.parquet", "tokenizers", "pytest", "hypothesis"),
    *("typer.rich_utils", "rich.live", "rich.progress", "pydantic.dataclasses", "httpx2", "yaml", "cryptography.x509"),
]
_forks, _server = multiprocessing.get_context("forkserver"), cast(Any, forkserver)._forkserver
_started: int | None = None  # the process that forks, once it runs


def forks() -> ForkServerContext:
    """Processes that are forks. What is tested may have begun a fork server of its own, with other imports."""
    global _started
    if _started is None or _server._forkserver_pid != _started:
        _server._stop()
        _server.set_forkserver_preload(PRELOADED)
        _server.ensure_running()
        _started = _server._forkserver_pid
    return _forks


@contextmanager
def spawned(environment: Mapping[str, str]) -> Iterator[Call]:
    """`call(function, *arguments)` begins a call of a test module's function there; its exceptions come here."""
    with ProcessPoolExecutor(1, forks(), initializer=_enter, initargs=({**os.environ, **environment},)) as pool:
        yield pool.submit


def python(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = Path(), stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS…`. env: variables beside those that are here."""
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        streams[0].write_text(stdin)
        process = forks().Process(target=_execute, args=(code, arguments, {**os.environ, **(env or {})}, cwd, streams))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, TIMEOUT)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in streams[1:]))


def on_stand_in_gpu(file: str, *arguments: str) -> Any:
    """What `python FILE ARGUMENTS…` tells `gpu.print_and_leave`, in a process that begins without torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _execute(code: str, arguments: tuple[str, ...], env: dict[str, str], cwd: Path, streams: list[Path]) -> None:
    _enter(env)
    os.chdir(cwd)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdin, sys.argv = os.fdopen(0, closefd=False), ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def _enter(environment: dict[str, str]) -> None:
    multiprocessing.set_start_method(None, force=True)  # of its own processes: what it is elsewhere
    os.environ.clear()
    os.environ.update(environment)

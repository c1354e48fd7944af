"""What all tests share: no account, no home and no network of the person who runs them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hub_standin import HubStandin
from hypothesis import settings
from testbed.spawned import python

# The same examples every time, and no deadline: how long an example takes says how busy the machine is. All in CI.
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile("default", settings.get_profile("ci"), max_examples=20)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")

_scratch = tempfile.TemporaryDirectory(prefix="tt-tests-")

Tt = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: the Hub's libraries read these when they are imported."""
    # Ignored in a shell's background job and under nohup; what tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = f"{_scratch.name}/hf"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Some tests compile for no vector unit, which torch's keys do not tell: another process's kernels fail in theirs.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_scratch.name}/compiled"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are processes, and each of them imports torch
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, Path(__file__).parents[:2]))  # of processes that tests start
    # Else a test passes whose own threads have failed, with all that they were to find.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import all modules without looking for garbage, a fifth of that time; later among what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    _scratch.cleanup()


@pytest.fixture(autouse=True)
def tt_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TT_HOME of the test's own, and no settings file of the person who runs it."""
    home = tmp_path / "tt-home"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TT_HOME", str(home))
    return home


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tt:
    """`tt` in this process and a folder of the test's own: here("explain", "clock") -> CompletedProcess."""
    from tt_cli.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, main(arguments), *capsys.readouterr())

    return run


@pytest.fixture
def tt(tmp_path: Path) -> Tt:
    """Run `tt` as a person does, as a process: tt("whoami", "--json", env={…}, stdin="…") -> CompletedProcess."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, stdin: str = "", cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        code = "import sys; from tt_cli.cli.main import main; sys.exit(main())"
        return python(code, *arguments, env=env, cwd=cwd, stdin=stdin)

    return run


@pytest.fixture(scope="session")
def _hub_process() -> Iterator[HubStandin]:
    with HubStandin() as hub:
        yield hub


@pytest.fixture
def hub(_hub_process: HubStandin) -> HubStandin:
    """An empty stand-in for the Hub (see hub_standin.py)."""
    _hub_process.reset()
    return _hub_process

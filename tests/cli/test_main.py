"""The entry: help that costs nothing, errors as one line, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tt_cli import __version__
from tt_cli.cli import main as entry
from tt_cli.errors import TTError, UsageError

Tt = Callable[..., subprocess.CompletedProcess[str]]

HEAVY = ("torch", "hivemind", "datasets", "numpy", "huggingface_hub", "pydantic", "rich", "transformers")
LIST_IMPORTS = """
import sys, json
from tt_cli.cli.main import main
code = main(sys.argv[1:])
print("\\n" + json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
PYTHON = [sys.executable, "-c"]


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    answer = subprocess.run([*PYTHON, LIST_IMPORTS, *arguments], capture_output=True, text=True, check=True)
    code, modules = json.loads(answer.stdout.splitlines()[-1])
    assert code == 0
    assert not set(HEAVY) & set(modules)


EVERY_HELP = """
import contextlib, io, json, sys
from tt_cli.cli.main import COMMANDS, main
helps = {}
for command in COMMANDS:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command.name, "--help"])
    helps[command.name] = text.getvalue()
print(json.dumps([helps, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_every_command_has_help_with_examples_and_imports_nothing_heavy_for_it() -> None:
    answer = subprocess.run([*PYTHON, EVERY_HELP], capture_output=True, text=True, check=True, timeout=240)
    helps, modules = json.loads(answer.stdout)
    assert not set(HEAVY) & set(modules)
    for name, text in helps.items():
        assert text.startswith(f"usage: tt {name}"), name
        assert f"examples:\n  tt {name}" in text, name
        assert "--debug" in text, name


def test_help_takes_less_than_importing_numpy() -> None:
    def seconds(code: str, *arguments: str) -> float:
        start = time.monotonic()
        subprocess.run([*PYTHON, code, *arguments], capture_output=True, check=True)
        return time.monotonic() - start

    both = [(seconds(LIST_IMPORTS, "--help"), seconds("import numpy, pydantic")) for _ in range(5)]
    assert min(ours for ours, _ in both) < min(theirs for _, theirs in both)


def test_help_names_every_command(tt: Tt) -> None:
    text = tt("--help").stdout
    for command in entry.COMMANDS:
        assert f"  {command.name:<11}{command.help}\n" in text
    assert "  tt demo " in text


def test_the_version(tt: Tt) -> None:
    assert tt("--version").stdout == f"tt {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jion"], "no command is called 'jion'; did you mean `tt join`?"),
        (["xyz"], "no command is called 'xyz'; there are demo, join, aux-peer"),
        (["--jsn"], "no such flag: --jsn; see `tt --help`"),
        (["whoami", "--jsn"], "no such flag: --jsn; did you mean --json?"),
        (["whoami", "--zzz=1"], "no such flag: --zzz; see `tt whoami --help`"),
        (["data", "encode", "a", "b", "--batchsize", "4"], "no such flag: --batchsize; did you mean --batch?"),
        (["data", "encode", "a", "b", "--x"], "no such flag: --x; see `tt data encode --help`"),
        (["whoami", "x"], "too many arguments: x; see `tt whoami --help`"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"tt: {said}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TTError("the disk is full"), 1, "tt: the disk is full\n"),
        (UsageError("no such run"), 2, "tt: no such run\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_a_command(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tt_cli.cli import logout

    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(logout, "run", fail)
    assert entry.main(["logout"]) == code
    assert capsys.readouterr().err == said
    with pytest.raises(type(error)):
        entry.main(["logout", "--debug"])
    with pytest.raises(type(error)):
        entry.main(["--debug", "logout"])


def test_a_bug_is_shown_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from tt_cli.cli import logout

    monkeypatch.setattr(logout, "run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        entry.main(["logout"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tt_cli.cli.main", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141

"""The entry: help that costs little, errors as one line, exit codes;"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import Tt
from typer.testing import CliRunner

from tt_cli import __version__
from tt_cli.cli import main as entry
from tt_cli.errors import TTError, UsageError

HEAVY = ("torch", "hivemind", "datasets", "numpy", "huggingface_hub", "transformers")
LIST_IMPORTS = """
import sys, json
from tt_cli.cli.main import main
code = main(sys.argv[1:])
print("\\n" + json.dumps([code, sorted(sys.modules)]))
"""
PYTHON = [sys.executable, "-c"]
AT_MOST = 4  # times what the libraries take that draw the help: what is drawn, and tt's own table of commands


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    answer = subprocess.run([*PYTHON, LIST_IMPORTS, *arguments], capture_output=True, text=True, check=True)
    code, modules = json.loads(answer.stdout.splitlines()[-1])
    assert code == 0
    assert not {*HEAVY, "pydantic", *(f"tt_cli.cli.{command.module}" for command in entry.COMMANDS)} & set(modules)


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command and subcommand."""
    for command in entry.COMMANDS:
        yield (command.name,)
        yield from ((command.name, name) for name in getattr(entry.loaded(command), "commands", {}))


EVERY_HELP = """
import contextlib, io, json, sys
from tt_cli.cli.main import COMMANDS, main
helps = {}
for command in COMMANDS:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main([command.name, "--help"])
    helps[command.name] = text.getvalue()
print(json.dumps([helps, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_every_command_has_help_with_examples_and_imports_nothing_heavy_for_it() -> None:
    environment = os.environ | {"COLUMNS": "120"}
    answer = subprocess.run(
        [*PYTHON, EVERY_HELP], env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    helps, modules = json.loads(answer.stdout)
    assert not set(HEAVY) & set(modules)
    for command in entry.COMMANDS:
        text = helps[command.name]
        assert text.lstrip().startswith(f"Usage: tt {command.name}"), command.name
        assert command.help in text
        assert "Examples:" in text and f"\n tt {command.name}" in text, command.name


def test_a_help_loses_no_brackets_and_no_line_of_its_examples() -> None:
    shown = CliRunner().invoke(entry.app, ["join", "--help"], env={"COLUMNS": "200"}).stdout
    for line in ("   [join]", '   hours = "mon-fri 22:00-07:00,sat-sun"', " tt join emoji --new-swarm"):
        assert any(found.rstrip() == line for found in shown.splitlines()), line
    assert "tensorboard[:DIR], wandb[:PROJECT]" in shown
    shown = CliRunner().invoke(entry.app, ["infer", "--help"], env={"COLUMNS": "200"}).stdout
    assert "ORGANISATION/REPOSITORY[/FILE]" in shown and "OWNER/NAME[@REVISION]" in shown


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_every_command_has_help_and_refuses_a_wrong_flag_in_one_line(here: Tt, words: tuple[str, ...]) -> None:
    helped = here(*words, "-h")
    assert helped.returncode == 0 and f"Usage: tt {' '.join(words)}" in helped.stdout
    wrong = here(*words, "--no-such-flag")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"tt: no such flag: --no-such-flag; see `tt {' '.join(words)} --help`\n"


@pytest.mark.parametrize("module", ["tt_cli", "tt_cli.cli.main"])
def test_the_modules_that_are_tt(module: str) -> None:
    command = [sys.executable, "-m", module, "whoami"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "Usage: tt whoami" in shown and "--json" in shown
    wrong = subprocess.run([*command, "--no-such-flag"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "tt: no such flag: --no-such-flag; see `tt whoami --help`\n"


def test_help_takes_a_few_times_what_the_libraries_take_that_draw_it() -> None:
    def seconds(code: str, *arguments: str) -> float:
        """Of computing: on a busy machine the wall's clock says how busy it is."""
        before = os.times()
        subprocess.run([*PYTHON, code, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    both = [(seconds(LIST_IMPORTS, "--help"), seconds("import typer, rich")) for _ in range(5)]
    assert min(ours for ours, _ in both) < AT_MOST * min(theirs for _, theirs in both)


def test_help_names_every_command(here: Tt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text, *others = (here(*words).stdout for words in (["--help"], [], ["-h"], ["help"]))
    assert others == [text] * 3
    for command in entry.COMMANDS:
        assert f"│ {command.name:<10} {command.help} " in text
        assert f"─ {command.panel} ─" in text
    for words in ("--install-completion", "--show-completion", "--debug", "--version", "\n tt demo "):
        assert words in text


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(here: Tt, flag: str) -> None:
    assert here(flag).stdout == f"tt {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jion"], "no such command 'jion'; did you mean 'join'?"),
        (["xyz"], "no such command 'xyz'; see `tt --help`"),
        (["--jsn"], "no such flag: --jsn; see `tt --help`"),
        (["whoami", "--jsn"], "no such flag: --jsn; did you mean --json?"),
        (["whoami", "--zzz=1"], "no such flag: --zzz; see `tt whoami --help`"),
        (["data", "encode", "a", "b", "--batchsize", "4"], "no such flag: --batchsize; did you mean --batch?"),
        (["data", "encode", "a", "b", "--x"], "no such flag: --x; see `tt data encode --help`"),
        (["whoami", "x"], "got unexpected extra argument(s) (x); see `tt whoami --help`"),
        (["join"], "missing argument 'RUN'; see `tt join --help`"),
        (["join", "emoji", "--threads", "0"], '--threads: "0": must be at least 1'),
        (["join", "emoji", "--threads", "two"], '--threads: "two": must be a whole number'),
        (["join", "emoji", "--peer"], "option '--peer' requires an argument; see `tt --help`"),
        (["join", "emoji", "--json", "--plain"], "--plain: not allowed with --json"),
        (["data"], "missing command; see `tt data --help`"),
        (["data", "encod"], "no such command 'encod'; did you mean 'encode'?"),
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
        (TTError("it says \x1b]0;owned\x07\x9b2J"), 1, "tt: it says ?]0;owned??2J\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_a_command(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tt_cli.auth import account

    def fail() -> bool:
        raise error

    monkeypatch.setattr(account, "logout", fail)
    assert entry.main(["logout"]) == code
    assert capsys.readouterr().err == said
    with pytest.raises(type(error)):
        entry.main(["logout", "--debug"])
    with pytest.raises(type(error)):
        entry.main(["--debug", "logout"])


def test_a_bug_is_shown_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from tt_cli.auth import account

    monkeypatch.setattr(account, "logout", lambda: 1 // 0)
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


@pytest.mark.parametrize("words", ["--version", "calc --list", "explain clock", "calc --help"])
def test_output_that_cannot_be_written_is_one_line(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tt_cli.cli.main", *words.split()]
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "tt: cannot write the output: No space left on device; free some space\n"
    assert (answer.returncode, answer.stderr) == (1, said)


def test_an_error_that_is_not_the_outputs_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from tt_cli.auth import account

    def fail() -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(account, "logout", fail)
    with pytest.raises(PermissionError):
        entry.main(["logout"])


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_letters_that_the_encoding_lacks_are_no_error(settings: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tt_cli.cli.main", "calc", "gpt2", "--gpu", "t4"]
    environment = os.environ | settings
    answer = subprocess.run(command, env=environment, capture_output=True, encoding="latin-1", check=False)
    assert (answer.returncode, answer.stderr) == (0, "") and "??????" in answer.stdout


def test_a_token_that_is_no_text_is_one_line() -> None:
    command = [sys.executable, "-m", "tt_cli.cli.main", "login", "--token"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    answer = subprocess.run(command, input=b"hf_\xff", env=environment, capture_output=True, check=False)
    assert answer.returncode == 2 and answer.stderr.endswith(b"or a name has letters that none has\n")


@pytest.mark.parametrize(
    ("closed", "words", "code", "said"),
    [
        (">&-", "--version", 0, ""),
        (">&-", "init my-run", 2, "tt: there is no terminal to ask on: give --task (default dalle)"),
        ("<&-", "infer -", 2, 'tt: no prompt; say what to draw, such as tt infer "a red apple"\n'),
        ("2>&-", "nosuch", 2, ""),
    ],
)
def test_a_closed_input_or_output_is_no_error(closed: str, words: str, code: int, said: str) -> None:
    """None of them is the next file that is opened: what is printed would be in it."""
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "tt_cli.cli.main", *words.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (code, "") and answer.stderr.startswith(said)

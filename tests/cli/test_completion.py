"""Shell completion: what a shell is offered comes from the commands themselves."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from conftest import Tt

from tt_cli.cli import main as entry
from tt_cli.cli.main import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")


def test_commands_flags_subcommands_and_values_are_completed(here: Tt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TT_COMPLETE", "complete_bash")

    def offered(*words: str) -> set[str]:
        """What bash is offered for the last word."""
        monkeypatch.setenv("COMP_WORDS", " ".join(("tt", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return set(here().stdout.split())

    assert offered("") >= {command.name for command in COMMANDS}
    assert offered("jo") == {"join"}
    assert offered("join", "--max") == {"--max-gpu-temp", "--max-upload", "--max-download"}
    assert offered("data", "") >= {"encode", "publish", "inspect"}
    assert offered("calc", "--precision", "") == {"fp32", "mixed", "pure16"}


@pytest.fixture
def shell_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer takes a name, in place of looking for the shell that it runs in, when the commands are built."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr(entry, "_group", entry._group.__wrapped__)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.usefixtures("shell_is_named")
def test_each_shell_gets_a_script_that_it_can_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_TT_COMPLETE" in text
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=text, text=True, check=True, timeout=60)


@pytest.mark.usefixtures("shell_is_named")
def test_another_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", "csh"]) == 2
    errors = capsys.readouterr().err
    assert "bash" in errors and errors.count("\n") == 1

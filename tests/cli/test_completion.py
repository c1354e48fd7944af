"""Shell completion: what a shell is offered comes from the commands themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tt_cli.cli.main import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")


def offered(*words: str) -> set[str]:
    """What bash is offered for the last word."""
    environment = os.environ | {
        "_TT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("tt", *words)),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "tt_cli"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_commands_flags_subcommands_and_values_are_completed() -> None:
    assert offered("") >= {command.name for command in COMMANDS}
    assert offered("jo") == {"join"}
    assert offered("join", "--max") == {"--max-gpu-temp", "--max-upload", "--max-download"}
    assert offered("data", "") >= {"encode", "publish", "inspect"}
    assert offered("calc", "--precision", "") == {"fp32", "mixed", "pure16"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_that_it_can_read(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert main(["--show-completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_TT_COMPLETE" in text
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=text, text=True, check=True, timeout=60)


def test_another_shell_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert main(["--show-completion", "csh"]) == 2
    errors = capsys.readouterr().err
    assert "bash" in errors and errors.count("\n") == 1

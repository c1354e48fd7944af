"""Shell completion: what a shell is offered comes from the commands' parsers."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest

from tt_cli.cli import completion
from tt_cli.cli.main import COMMANDS, main

COMPLETE = """
source /dev/stdin
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_tt "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_flags_and_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)

    def offered(*words: str) -> set[str]:
        command = ["bash", "-c", COMPLETE, "bash", *words]
        return set(subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.split())

    assert offered("tt", "") >= {command.name for command in COMMANDS}
    assert offered("tt", "jo") == {"join"}
    assert offered("tt", "join", "--max") == {"--max-gpu-temp", "--max-upload", "--max-download"}
    assert "encode" in offered("tt", "data", "")
    assert offered("tt", "completion", "") >= set(completion.SHELLS)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_gets_a_script_that_it_can_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for command in COMMANDS:
        assert command.name in text
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=text, text=True, check=True, timeout=60)


def test_runs_and_files_are_completed_as_files() -> None:
    [commands] = [a for a in completion.whole_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    places = {action.dest: getattr(action, "complete", None) for action in commands.choices["aux-peer"]._actions}
    assert places["run"]
    assert not places["peer"]


def test_another_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err

"""`tt completion SHELL`: print the script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
PLACES = {"DIR", "FILE", "OUT", "PATH", "PLACE", "RUN"}  # of arguments that may be a file or a folder
EXAMPLES = """\
tt completion bash > ~/.local/share/bash-completion/completions/tt
tt completion zsh > ~/.zfunc/_tt          with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
tt completion fish > ~/.config/fish/completions/tt.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt completion` takes."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    print(shtab.complete(whole_parser(), args.shell), end="")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All commands below one parser, as shtab reads them; `tt` itself makes only that of the command that runs."""
    import importlib

    from tt_cli.cli.main import COMMANDS

    parser = argparse.ArgumentParser(prog="tt")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.help, description=command.help)
        importlib.import_module(f"tt_cli.cli.{command.module}").add_arguments(one)
        one.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        _mark_files(one)
    return parser


def _mark_files(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _mark_files(each)
        elif action.choices is None and str(action.metavar or action.dest).upper() in PLACES:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # what shtab looks for

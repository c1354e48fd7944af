"""The entry of `tt`: finds the command, parses its flags, runs it, turns errors into a line and an exit code.

Notable:
- commands are named in a table, so help costs no import; only the command that runs is imported;
- a command is a module with EXAMPLES, add_arguments(parser) and run(args) -> exit code.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from tt_cli import __version__
from tt_cli.errors import TTError, UsageError

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C
BROKEN_PIPE = 141  # … and by a reader that went away


@dataclass(frozen=True)
class Command:
    """One command: its name, what it is for, the module in tt_cli.cli that does it, its group in the help."""

    name: str
    help: str
    module: str
    group: str


COMMANDS = (
    Command("demo", "start a small swarm on this machine and watch it learn to draw", "demo", "Try it"),
    Command("join", "train with a run's swarm", "join", "Take part"),
    Command("aux-peer", "keep a run's swarm together; needs no GPU", "aux_peer", "Take part"),
    Command("status", "say what the peers of this machine do, and why", "status", "Take part"),
    Command("pause", "have a peer leave the swarm and wait", "pause", "Take part"),
    Command("resume", "have a peer go on after `tt pause`", "resume", "Take part"),
    Command("finish", "have a peer end after the current step", "finish", "Take part"),
    Command("doctor", "find what would keep a peer from working here", "doctor", "Take part"),
    Command("explain", "say what a trouble or an error means", "explain", "Take part"),
    Command("monitor", "watch a run's swarm", "monitor", "See what it does"),
    Command("infer", "draw pictures with what a run has learned", "infer", "See what it does"),
    Command("convert", "turn published weights into a checkpoint, and back", "convert", "See what it does"),
    Command("init", "set up a new run", "init", "Organise"),
    Command("check", "validate a run and dry-run one step of it", "check", "Organise"),
    Command("calc", "say how much memory training a model takes", "calc", "Organise"),
    Command("authority", "issue a closed run's passes, ban, give orders", "authority", "Organise"),
    Command("data", "encode pictures into a data set, publish it, look at it", "data", "Organise"),
    Command("site", "write a run's web page into files", "site", "Organise"),
    Command("login", "log in to Hugging Face", "login", "Account"),
    Command("logout", "forget the login", "logout", "Account"),
    Command("whoami", "say who is logged in", "whoami", "Account"),
    Command("identity", "show, export or import this machine's peers' keys", "identity", "Account"),
    Command("completion", "print what a shell completes `tt` with", "completion", "Account"),
)

EXAMPLES = """\
tt demo                       watch a swarm on this machine learn to draw emoji
tt join emoji                 train with the built-in run
tt monitor emoji              see who trains, and the loss
tt infer "a red apple"        draw with the newest checkpoint"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError in one line, with the way to the help."""
        raise UsageError(message if message.endswith("?") else f"{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What argparse's does, but nothing may be unknown, in whom it concerns: `tt data encode`, not `tt data`."""
        found, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return found, unknown
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        close = difflib.get_close_matches(flag, self._option_string_actions, n=1) if flag else []
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"no such flag: {flag}{hint}" if flag else f"too many arguments: {' '.join(unknown)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tt` with `arguments` (default: those of the process) and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv[: argv.index("--") if "--" in argv else None]
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except TTError as error:
        if debug:
            raise
        print(f"tt: {error}", file=sys.stderr)
        if sys.stderr.isatty():  # elsewhere an error is one line
            from tt_cli.cli.troubles import of_error

            print(f"    more: tt explain {of_error(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _dispatch(argv: list[str]) -> int:
    while argv and argv[0] == "--debug":
        argv.pop(0)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"tt {__version__}")
        return 0
    command = _find(argv[0])
    module = importlib.import_module(f"tt_cli.cli.{command.module}")
    args = command_parser(command, module).parse_args(argv[1:])
    code = module.run(args)
    assert isinstance(code, int)
    return code


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    if name.startswith("-"):
        raise UsageError(f"no such flag: {name}; see `tt --help`")
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `tt {close[0]}`?" if close else f"there are {', '.join(names)}"
    raise UsageError(f"no command is called '{name}'; {hint}")


def command_parser(command: Command, module: ModuleType) -> Parser:
    """Return the parser of one command."""
    parser = Parser(
        prog=f"tt {command.name}",
        description=command.help[0].upper() + command.help[1:] + ".",
        epilog=f"examples:\n{_indented(module.EXAMPLES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def help_text() -> str:
    """Return what `tt --help` prints."""
    lines = ["usage: tt COMMAND …", "", "Train a text-to-image transformer together over the internet."]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<11}{command.help}" for command in COMMANDS if command.group == group]
    lines += ["", "Anywhere:", "  --help     show this, or with a command what it can do"]
    lines += ["  --debug    show tracebacks of errors", "  --version  show the version"]
    return "\n".join([*lines, "", "examples:", _indented(EXAMPLES)])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    sys.exit(main())

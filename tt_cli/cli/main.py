"""The Typer app `tt`: which commands there are, how the one that runs is loaded, and errors as one line.

Notable:
- commands stand in a table, so that help costs no import; the module of the one that runs registers it in `app`;
- whatever a person got wrong is one line on standard error and an exit code; a traceback is for bugs, or --debug.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from tt_cli import __version__
from tt_cli.errors import TTError, UsageError, disk_remedy

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C
BROKEN_PIPE = 141  # … and by a reader that went away


@dataclass(frozen=True)
class CommandEntry:
    """One command: its name, what it is for, the module in tt_cli.cli that registers it, its panel in the help."""

    name: str
    help: str
    module: str
    panel: str


COMMANDS = (
    CommandEntry("demo", "Start a small swarm on this machine and watch it learn.", "demo", "Try it"),
    CommandEntry("join", "Train with a run's swarm.", "join", "Take part"),
    CommandEntry("aux-peer", "Keep a run's swarm together; needs no GPU.", "aux_peer", "Take part"),
    CommandEntry("status", "Say what the peers of this machine do, and why.", "running_peers", "Take part"),
    CommandEntry("pause", "Have a peer leave the swarm and wait.", "running_peers", "Take part"),
    CommandEntry("resume", "Have a peer go on after `tt pause`.", "running_peers", "Take part"),
    CommandEntry("finish", "Have a peer end after the current step.", "running_peers", "Take part"),
    CommandEntry("doctor", "Find what would keep a peer from working here.", "doctor", "Take part"),
    CommandEntry("explain", "Say what a trouble or an error means.", "doctor", "Take part"),
    CommandEntry("monitor", "Watch a run's swarm.", "monitor", "See what it does"),
    CommandEntry("infer", "Draw or write with what a run has learned.", "infer", "See what it does"),
    CommandEntry("convert", "Turn published weights into a checkpoint, and back.", "infer", "See what it does"),
    CommandEntry("init", "Set up a new run.", "init", "Organise"),
    CommandEntry("check", "Validate a run and dry-run one step of it.", "init", "Organise"),
    CommandEntry("calc", "Say how much memory training a model takes.", "calc", "Organise"),
    CommandEntry("authority", "Issue a closed run's passes, ban, give orders.", "authority", "Organise"),
    CommandEntry("data", "Encode pictures into a data set, publish it, look at it.", "data", "Organise"),
    CommandEntry("site", "Write a run's web page into files.", "monitor", "Organise"),
    CommandEntry("login", "Log in to Hugging Face.", "login", "Account"),
    CommandEntry("logout", "Forget the login.", "login", "Account"),
    CommandEntry("whoami", "Say who is logged in.", "login", "Account"),
    CommandEntry("identity", "Show, export or import this machine's peers' keys.", "login", "Account"),
)

EXAMPLES = """\
tt demo                       watch a swarm on this machine learn to draw emoji
tt join emoji --peer …        train with a swarm, by its organiser's line
tt monitor emoji --peer …     see who trains, and the loss
tt infer "a red apple"        draw with the newest checkpoint"""


class LazyGroup(TyperGroup):
    """The commands of the table, each loaded when it is run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        registered = self.commands
        self.epilog = f"Examples:\n\n{EXAMPLES}"
        self.commands = {entry.name: registered.get(entry.name) or TyperCommand(entry.name) for entry in COMMANDS}
        for entry in COMMANDS:
            command: Any = self.commands[entry.name]
            command.help, command.short_help, command.rich_help_panel = entry.help, entry.help, entry.panel

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command's module, then find the command as any group does."""
        self.commands.update({entry.name: _for_rich(entry) for entry in COMMANDS if entry.name == args[0]})
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *unused: Any, **settings: Any) -> NoReturn:
        """Run `tt` with `args` (default: those of the process) and end with its exit code, by SystemExit."""
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is None:  # closed: the next file would have its number, and all that is printed there
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
        words = list(sys.argv[1:] if args is None else args)
        flags_end = words.index("--") if "--" in words else len(words)
        debug = "--debug" in words[:flags_end]
        words = [word for word in words[:flags_end] if word != "--debug"] + words[flags_end:]
        self._main_shell_completion({}, "tt")
        try:
            out = sys.stdout
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="surrogateescape")  # who reads it says what is wrong
            if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or out.encoding != "utf-8"):
                out.reconfigure(errors="replace")  # a letter that the terminal's encoding lacks is no error
            code = self._run(["--help"] if words[:1] in ([], ["help"]) else words)
            print(end="", flush=True)
        except (TTError, typer.TyperException) as error:
            if debug:
                raise
            from tt_cli.terminal.format import printable  # an authority's words may be in it, or a member's

            print(f"tt: {printable(str(error) if isinstance(error, TTError) else error_line(error))}", file=sys.stderr)
            if sys.stderr.isatty() and isinstance(error, TTError):  # elsewhere an error is one line
                from tt_cli.terminal.troubleshooting import of_error

                print(f"    more: tt explain {of_error(error)}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            if debug:
                raise
            code = INTERRUPTED
        except OSError as error:
            if debug or not _output_fails():
                raise
            code = BROKEN_PIPE
            if not isinstance(error, BrokenPipeError):
                remedy = disk_remedy(error, "write it elsewhere")
                print(f"tt: cannot write the output: {error.strerror}; {remedy}", file=sys.stderr)
                code = TTError.exit_code
        except ValueError:  # of a library that takes no other text
            if debug or all(word.encode("utf-8", "replace").decode() == word for word in words):
                raise
            print("tt: what was given is not UTF-8 text; type it in UTF-8, or rename the file", file=sys.stderr)
            code = UsageError.exit_code
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):  # what Rich makes of one
                raise
            code = BROKEN_PIPE
        sys.exit(code)

    def _run(self, words: list[str]) -> int:
        try:
            with self.make_context("tt", words) as context:
                self.invoke(context)
        except typer.Exit as end:
            return end.exit_code
        return 0


def _output_fails() -> bool:
    """Tell whether standard output takes no more. It goes nowhere then: Python flushes it once more at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


app = typer.Typer(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="COMMAND …",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tt {__version__}")
        raise typer.Exit


@app.callback()
def tt(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", metavar="", help="show the version", is_eager=True, callback=_show_version),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="show tracebacks of errors; may stand after a command too")
    ] = False,
) -> None:
    """Train a text-to-image transformer together over the internet."""


def loaded(entry: CommandEntry) -> Any:
    """The command of an entry, with its flags and examples."""
    importlib.import_module(f"tt_cli.cli.{entry.module}")
    return get_group(app).commands[entry.name]


@cache
def _for_rich(entry: CommandEntry) -> Any:
    """The command with its examples under a heading, and no [text] in it that Rich takes for markup of its own."""
    from rich.markup import escape

    command = loaded(entry)
    children = getattr(command, "commands", {})
    for name, child in children.items():
        lines = [line for line in command.epilog.splitlines() if line.startswith(f"tt {command.name} {name} ")]
        child.epilog = "\n".join(lines)
    for each in (command, *children.values()):
        each.epilog = each.epilog and escape(f"Examples:\n\n{each.epilog}")
        for part in (each, *each.params):
            part.help = part.help and escape(part.help)
    return command


def error_line(error: Any) -> str:
    """One line about what Typer found wrong with the words of a command line, and what to do."""
    hint = f"see `{error.ctx.command_path if error.ctx else 'tt'} --help`"
    if hasattr(error, "possibilities"):
        close = f"did you mean {error.possibilities[0]}?" if error.possibilities else hint
        return f"no such flag: {error.option_name}; {close}"
    if isinstance(error, typer.BadParameter) and error.message and error.param is not None:
        return f"{'/'.join(error.param.opts)}: {_with_value(error)}"
    message, _, suggestion = error.format_message().rstrip(".").partition(". Did you mean ")
    return f"{message[:1].lower()}{message[1:]}; {f'did you mean {suggestion}' if suggestion else hint}"


def _with_value(error: typer.BadParameter) -> str:
    """The fault of a value, without the words with which pydantic begins, and the value where it is not named."""
    message = re.sub("^(Input|Value error,) ", "", error.message)
    findings: list[Any] = getattr(error.__cause__, "errors", list)()
    value = " ".join(str(findings[0]["input"]).split()) if findings else ""
    return message if value in message else f"{value}: {message}"


_group = cache(lambda: get_command(app))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tt` with `arguments` (default: those of the process) and return its exit code."""
    try:
        _group()(arguments)
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        return end.code
    return 0


if __name__ == "__main__":
    # Commands register in the app of the module of this name, which __main__ is not.
    sys.exit(importlib.import_module("tt_cli.cli.main").main())

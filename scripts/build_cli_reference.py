"""Writes docs/cli.md and docs/man/tt.1 from the parsers of `tt`, so that what is written down is what is parsed.

    python scripts/build_cli_reference.py

Run it after a command or flag has changed; a test compares what is committed with what this makes. The text comes from
the parsers' actions, not from argparse's own help, whose form differs between versions of Python.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from tt_cli.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE, MAN = "docs/cli.md", "docs/man/tt.1"
HEAD = """\
# Commands

Every command of `tt`, with its flags and defaults. This page is made from the code by
`scripts/build_cli_reference.py`; it says the same as `tt COMMAND --help`. Each command also takes `--help`, and
`--debug`, which shows the traceback of an error.

Exit codes: 0 done, 1 something outside failed (network, disk, another process), 2 wrong usage, 130 ended by Ctrl-C.
Commands whose exit codes say more name them. RUN is a built-in name (`emoji`, `emoji-demo`, `dalle`), a TOML file, or
`ORGANISATION/REPOSITORY` on the Hub.
"""


def parsers() -> Iterator[tuple[main.Command, str, argparse.ArgumentParser]]:
    """Each command of the table, with its examples and its parser."""
    for command in main.COMMANDS:
        module = importlib.import_module(f"tt_cli.cli.{command.module}")
        yield command, module.EXAMPLES, main.command_parser(command, module)


def page() -> str:
    """The page of the documentation, Markdown."""
    parts = [HEAD]
    group = ""
    for command, examples, parser in parsers():
        if command.group != group:
            group = command.group
            parts.append(f"## {group}\n")
        parts.append(f"### tt {command.name}\n")
        parts.append(f"{sentence(command.help)}\n")
        parts += list(_sections(parser))
        parts.append(f"```\n{examples.strip()}\n```\n")
    return "\n".join(parts).rstrip() + "\n"


def man() -> str:
    """The manual page, roff."""
    lines = ['.TH TT 1 "" "tt" "User commands"', ".SH NAME", "tt \\- train a transformer together over the internet"]
    lines += [".SH SYNOPSIS", ".B tt", ".I COMMAND", "\\&..."]
    for command, examples, parser in parsers():
        lines += [f".SH tt {_roff(command.name)}", _roff(sentence(command.help))]
        for each in family(parser):
            lines += [".PP", f"\\fB{_roff(usage(each))}\\fR"]
            for action in shown(each):
                lines += [".TP", f"\\fB{_roff(invocation(action))}\\fR", _roff(meaning(each, action))]
        lines += [".PP", ".nf", *(_roff(line) for line in examples.strip().splitlines()), ".fi"]
    lines += [".SH EXIT STATUS", "0 done, 1 something outside failed, 2 wrong usage, 130 ended by Ctrl-C."]
    return "\n".join(lines) + "\n"


def family(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from family(each)


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What the parser takes beside subcommands, --help and --debug."""
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        and "--debug" not in action.option_strings
    ]


def usage(parser: argparse.ArgumentParser) -> str:
    """How the command is typed: its name, what must be given, what may be."""
    words = [parser.prog]
    if any(action.option_strings for action in shown(parser)):
        words.append("[flags]")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("|".join(action.choices))
        elif not action.option_strings:
            words.append(_counted(action))
    return " ".join(words)


def invocation(action: argparse.Action) -> str:
    """A flag with what follows it, or the name of an argument."""
    if not action.option_strings:
        return _name(action)
    value = "" if action.nargs == 0 else f" {_counted(action)}"
    return ", ".join(action.option_strings) + value


def meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an action, with its values filled in."""
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def sentence(text: str) -> str:
    """The same, beginning with a capital, ending with a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    for each in family(parser):
        if each is not parser:
            yield f"#### {each.prog}\n"
            if each.description or _help_of(parser, each):
                yield f"{sentence(each.description or _help_of(parser, each))}\n"
        yield f"```\n{usage(each)}\n```\n"
        if rows := [f"| `{_cell(invocation(one))}` | {_cell(meaning(each, one))} |" for one in shown(each)]:
            yield "\n".join(["| argument or flag | meaning |", "|---|---|", *rows]) + "\n"


def _help_of(parser: argparse.ArgumentParser, child: argparse.ArgumentParser) -> str:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                if action.choices[choice.dest] is child:
                    return choice.help or ""
    return ""


def _name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _counted(action: argparse.Action) -> str:
    name = _name(action)
    match action.nargs:
        case None:
            return name
        case "?":
            return f"[{name}]"
        case "*":
            return f"[{name} …]"
        case "+":
            return f"{name} …"
    return " ".join([name] * int(action.nargs))


def _cell(text: str) -> str:
    return re.sub(r"<(?=\w)", "&lt;", text).replace("|", "\\|")


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for name, text in ((PAGE, page()), (MAN, man())):
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")

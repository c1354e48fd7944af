"""Writes docs/cli.md and docs/man/tt.1 from the app of `tt`. Run it after a command or a flag has changed."""

from pathlib import Path
from typing import Any

from tt_cli.cli.main import COMMANDS, loaded

ROOT = Path(__file__).resolve().parent.parent
PAGE, MAN = "docs/cli.md", "docs/man/tt.1"
MAN_HEAD = ['.TH TT 1 "" "tt" "User commands"', ".SH NAME", "tt \\- train a transformer together", ".SH DESCRIPTION"]
HEAD = """\
Every command of `tt`, as `tt COMMAND --help` says it; made by `scripts/build_cli_reference.py`. Each also takes `-h`,
and `--debug`, which shows tracebacks. `tt --install-completion` has your shell complete commands and flags.

Exit codes: 0 done, 1 something outside failed (network, disk, another process), 2 wrong usage, 130 ended by Ctrl-C.
Commands whose exit codes say more name them. RUN is a built-in name (`emoji`, `words`, `dalle`), a TOML file, or
`ORGANISATION/REPOSITORY` on the Hub."""


def section(name: str, command: Any) -> list[str]:
    """Blocks of Markdown: what a command and its subcommands are for, how each is typed, what it takes."""
    usage, rows = [name, *(["[flags]"] if any(part.opts[0][0] == "-" for part in command.params) else [])], []
    for part in command.params:
        flag = ", ".join([*part.opts, *part.secondary_opts]) if part.param_type_name == "option" else ""
        value = part.display_type_rich(ctx=None).strip("<>").replace("|", "\\|") if flag else part.metavar
        usage += [] if flag else [value if part.required else f"[{value}]"]
        rows.append(f"| `{f'{flag} {value}'.strip()}` | {part.help} |")
    children = getattr(command, "commands", {})
    typed = " ".join([*usage, "|".join(children)]).strip()
    blocks = [f"{'#' * (2 + name.count(' '))} {name}", command.help, f"```\n{typed}\n```"]
    blocks += ["\n".join(["| argument or flag | meaning |", "|---|---|", *rows])] if rows else []
    blocks += [block for child in children for block in section(f"{name} {child}", children[child])]
    return [*blocks, f"```\n{command.epilog}\n```"] if command.epilog else blocks


def page() -> str:
    """The page of the documentation, Markdown."""
    panels = {entry.panel: [each for each in COMMANDS if each.panel == entry.panel] for entry in COMMANDS}
    blocks = [[f"## {name}", *sum((section(f"tt {e.name}", loaded(e)) for e in panels[name]), [])] for name in panels]
    return "\n\n".join(["# Commands", HEAD, *sum(blocks, [])]) + "\n"


def man() -> str:
    """The manual page, roff: a section a command."""
    lines = [*MAN_HEAD, HEAD]
    for block in sum((section(f"tt {entry.name}", loaded(entry)) for entry in COMMANDS), []):
        first, *rest = block.replace("\\|", "|").splitlines()
        table = [line for row in rest[1:] for line in (".TP", *row.strip("| ").removeprefix("`").split("` | ", 1))]
        heading = [first.replace("#### ", ".SS ").replace("### ", ".SH ")]
        shown = {"#": heading, "`": [".PP", ".nf", *rest[:-1], ".fi"], "|": table}.get(first[0], [block])
        lines += [line.replace("\\", "\\e").replace("-", "\\-") for line in shown]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    (ROOT / MAN).write_text(man(), encoding="utf-8")

"""`tt doctor`: what would keep a peer from working here; `tt explain`: what a line of the tool means."""

from __future__ import annotations

import dataclasses
import difflib
import json as codec
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from tt_cli.cli.main import app
from tt_cli.cli.options import Device, Json, argument, option
from tt_cli.errors import UsageError
from tt_cli.terminal.format import printable
from tt_cli.terminal.troubleshooting import Section, explaining, sections

DOCTOR_EXAMPLES = """\
tt doctor               the machine
tt doctor emoji         … and whether it can train this run
tt doctor emoji --json

--json prints {"ok": …, "checks": [{"name", "verdict": "pass" | "warning" | "fail", "words", "fix"}, …]}.
Exit code: 0 when nothing fails, 1 else."""
EXPLAIN_EXAMPLES = """\
tt explain                      the topics
tt explain membership           all that is known of one
tt explain clock                a trouble by the word under which `tt status` counts it
tt explain "no group formed in time"
tt explain data --json          {"topic", "title", "text": Markdown}"""
STYLES = {"pass": "green", "warning": "yellow", "fail": "bold red"}


@app.command(epilog=DOCTOR_EXAMPLES)
def doctor(
    run: Annotated[str | None, argument("RUN", "built-in name, TOML file, or ORGANISATION/REPOSITORY")] = None,
    peer: Annotated[list[str] | None, option("MULTIADDR", "as for `tt join`")] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Print a line for each check as it is made."""
    from tt_cli.auth.account import token_source, whoami
    from tt_cli.auth.eligibility import require_member
    from tt_cli.doctor.checks import Asked, examine
    from tt_cli.peer.join_settings import read_settings, settings_file
    from tt_cli.run import load_run
    from tt_cli.run.initial_peers import initial_peers

    if peer and not run:
        raise UsageError("--peer: which run's? Give RUN too")
    config = load_run(run) if run else None
    names = {run or "", config.run.name, config.identity} if config is not None else set()
    mine = read_settings({"peer": peer, "device": device}, names, settings_file())
    asked = Asked(
        run=config,
        name=run or "",
        peers=initial_peers(config, mine.get("peer", [])) if config is not None else [],
        host=mine.get("host", "0.0.0.0"),
        port=mine.get("port", 0),
        device=mine.get("device"),
        login=lambda: whoami().name if token_source() is not None else None,
        member=lambda: require_member(config) if config is not None else None,
        limits=mine.household,
    )
    show_checks(examine(asked), json, {verdict: f"{verdict:<8}" for verdict in STYLES})


def show_checks(checks: Iterable[Any], json: bool, marks: dict[str, str]) -> None:
    """Print each check as it is made, with the mark of its verdict; exit code 1 when one fails."""
    console, made = Console(highlight=False), []
    for check in checks:
        made.append(dataclasses.asdict(check))
        if not json:
            mark, words = marks[check.verdict], f"{check.name}: {printable(check.words)}"
            console.print(Text.assemble((mark, STYLES[check.verdict]), words), soft_wrap=True)
            if check.fix and check.verdict != "pass":
                console.print(Text(f"{' ' * max(4, len(mark))}→ {check.fix}"), soft_wrap=True)
    failed = any(check["verdict"] == "fail" for check in made)
    if json:
        print(codec.dumps({"ok": not failed, "checks": made}, indent=1))
    if failed:
        raise typer.Exit(1)


@app.command(epilog=EXPLAIN_EXAMPLES)
def explain(
    topic: Annotated[
        list[str] | None, argument("TOPIC…", "a topic, the beginning of one, or a line that tt said")
    ] = None,
    json: Json = False,
) -> None:
    """Find the section and print it."""
    if topic:
        section = _section_about(" ".join(topic))
        facts = {"topic": section.anchor, "title": section.title, "text": section.text}
    else:
        facts = {section.anchor: section.title for section in sections().values()}
    if json:
        print(codec.dumps(facts, indent=1, ensure_ascii=False))
        return
    if not topic:
        print(*(f"{anchor:<24} {title}" for anchor, title in facts.items()), sep="\n")
        return
    text = re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", section.text)  # to another topic: its name says enough
    text = re.sub(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)", r"\1 (docs/\2)", text)
    console = Console(highlight=False)
    console.print(f"{section.title}\n", style="bold", markup=False)
    console.print(Markdown(text))


def _section_about(words: str) -> Section:
    known = sections()
    name = words.strip().lower().replace(" ", "-")
    if (section := known.get(name) or explaining(words)) is not None:
        return section
    starting = [anchor for anchor in known if anchor.startswith(name)]
    if len(starting) == 1:
        return known[starting[0]]
    close = starting or difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`tt explain` lists the topics"
    raise UsageError(f"nothing is written about {words!r}; {hint}")

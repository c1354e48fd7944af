"""`tt doctor`: what would keep a peer from working on this machine, each with its fix."""

from __future__ import annotations

import argparse
import dataclasses
import json

EXAMPLES = """\
tt doctor               the machine
tt doctor emoji         … and whether it can train this run
tt doctor emoji --json

--json prints {"ok": …, "checks": [{"name", "verdict": "pass" | "warning" | "fail", "words", "fix"}, …]}.
Exit code: 0 when nothing fails, 1 else."""
STYLES = {"pass": "green", "warning": "yellow", "fail": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt doctor` takes."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument("--peer", metavar="MULTIADDR", action="append", default=[], help="as for `tt join`")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; default: as `tt join` chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line for each check as it is made."""
    from rich.console import Console
    from rich.text import Text

    from tt_cli.auth import require_member, token_source, whoami
    from tt_cli.cli.join import initial_peers
    from tt_cli.doctor.checks import Asked, examine
    from tt_cli.peer.join_settings import read_settings, settings_file
    from tt_cli.run import load_run

    config = load_run(args.run) if args.run else None
    names = {args.run, config.run.name, config.identity} if config is not None else set()
    mine = read_settings({"peer": args.peer, "device": args.device}, names, settings_file())
    asked = Asked(
        run=config,
        name=args.run or "",
        peers=initial_peers(config, mine.get("peer", [])) if config is not None else [],
        host=mine.get("host", "0.0.0.0"),
        port=mine.get("port", 0),
        device=mine.get("device"),
        login=lambda: whoami().name if token_source() is not None else None,
        member=lambda: require_member(config) if config is not None else None,
        limits=mine.household,
    )
    console, checks = Console(highlight=False), []
    for check in examine(asked):
        checks.append(check)
        if not args.json:
            line = Text.assemble((f"{check.verdict:<8}", STYLES[check.verdict]), f"{check.name}: {check.words}")
            console.print(line, soft_wrap=True)
            if check.fix and check.verdict != "pass":
                console.print(Text(f"        → {check.fix}"), soft_wrap=True)
    failed = any(check.verdict == "fail" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    return 1 if failed else 0

"""`tt check RUN`: everything that a run file names is opened, and one step of it is made."""

from __future__ import annotations

import argparse
import dataclasses
import json

EXAMPLES = """\
tt check my-run/run.toml           after `tt init`, and after every change
tt check org/run                   as volunteers will read it
tt check my-run/run.toml --no-step --json

It looks at every field, keys, tokenizer, data, VQGAN, model and memory, peers and authority, and dry-runs one step.
--json prints {"ok": …, "checks": [{"name", "verdict": "pass" | "warning" | "fail", "words", "fix"}, …]}.
Exit code: 0 when nothing fails, 1 else. `tt doctor` looks at the machine."""
MARKS = {"pass": ("✓ ", "green"), "warning": ("! ", "yellow"), "fail": ("✗ ", "bold red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt check` takes."""
    parser.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument("--peer", metavar="MULTIADDR", action="append", default=[], help="try this one, not the file's")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N for the step")
    parser.add_argument("--no-step", dest="step", action="store_false", help="make no step: for small machines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line for each check as it is made."""
    from rich.console import Console
    from rich.text import Text

    from tt_cli.cli.join import checked_peers
    from tt_cli.organise.run_check import look_over

    console, checks = Console(highlight=False), []
    for check in look_over(args.run, peers=checked_peers(args.peer), device=args.device, step=args.step):
        checks.append(check)
        if not args.json:
            line = Text.assemble(MARKS[check.verdict], f"{check.name}: {check.words}")
            console.print(line, soft_wrap=True)
            if check.fix and check.verdict != "pass":
                console.print(Text(f"    → {check.fix}"), soft_wrap=True)
    failed = any(check.verdict == "fail" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    return 1 if failed else 0

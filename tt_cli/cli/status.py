"""`tt status`: what the peers of this machine do, and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.supervisor.slot import SeenSlot

EXAMPLES = """\
tt status
tt status emoji
tt status emoji --json | jq -r .peers[0].state

--json prints {"peers": […]}; each has running, answers, run, role, state, reason, since, until, step, peers, share,
samples_per_second, last_round, choices, limits, troubles, bytes_sent, bytes_received, started and more.
Exit code: 0 when a peer runs, 3 when none does."""
NOT_RUNNING = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt status` takes."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """The run, which may be left out."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="as given to `tt join`; default: whichever there is")


def run(args: argparse.Namespace) -> int:
    """Print what is known of each peer; those that run first."""
    from tt_cli.run import folders

    peers = sorted(known_peers(args.run), key=lambda seen: (not seen.running, -seen.status.updated))
    if args.json:
        print(json.dumps({"peers": [_as_json(seen) for seen in peers]}, indent=1))
    elif peers:
        _print(peers)
    else:
        whose = f"of run {args.run} " if args.run else ""
        print(f"no peer {whose}has run on this machine (in {folders.home()}); `tt join {args.run or 'RUN'}` starts one")
    return 0 if any(seen.running for seen in peers) else NOT_RUNNING


def known_peers(run: str | None) -> list[SeenSlot]:
    """Those of `run`, or all, that run on this machine or have left their status."""
    from tt_cli.run import folders, load_run
    from tt_cli.supervisor.slot import look_at, slots_in

    names = {run}
    if run is not None and Path(run).is_file():
        names = {load_run(run).identity}
    found = [look_at(slot) for slot in slots_in(folders.home())]
    return [
        seen
        for seen in found
        if seen is not None and (run is None or names & {seen.status.run, seen.status.identity, seen.slot.folder.name})
    ]


def _as_json(seen: SeenSlot) -> dict[str, object]:
    return {"running": seen.running, "answers": seen.answers, **json.loads(seen.status.model_dump_json())}


def _print(peers: list[SeenSlot]) -> None:
    from rich.console import Console

    from tt_cli.terminal.live_view import output_mode
    from tt_cli.terminal.status_lines import status_lines

    live = output_mode(sys.stdout) == "live"
    console = Console(highlight=False, color_system="auto" if live else None)
    for number, seen in enumerate(peers):
        if number:
            console.print()
        for line in status_lines(seen, time.time(), console.width if live else 500):
            console.print(line, soft_wrap=True)

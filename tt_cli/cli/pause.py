"""`tt pause`: have a running peer leave the swarm and wait, with its memory free."""

from __future__ import annotations

import argparse
import re
from typing import Any

from tt_cli.cli.status import add_run_argument, known_peers
from tt_cli.errors import TTError, UsageError

EXAMPLES = """\
tt pause                  until `tt resume`
tt pause emoji --for 2h
0 18 * * 1-5  tt pause emoji --for 4h     in a crontab: weekdays from 18:00 to 22:00"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class NoSuchPeer(TTError):
    """No such peer runs on this machine."""

    exit_code = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt pause` takes."""
    add_run_argument(parser)
    parser.add_argument(
        "--for", dest="seconds", type=_seconds, metavar="TIME", help="go on after it: 45m, 2h, 1h30m, 1d"
    )


def run(args: argparse.Namespace) -> int:
    """Ask for it, print what happens now."""
    return tell(args.run, {"command": "pause", "seconds": args.seconds})


def tell(run: str | None, request: dict[str, Any]) -> int:
    """Send `request` to the peers of a run, or to the only one, and print what each answers.

    An aux peer of the run is meant only where no trainer of it runs. Raises NotRunning, UsageError; TTError when a peer
    refuses.
    """
    from tt_cli.supervisor.control_socket import ask

    running = [seen for seen in known_peers(run) if seen.running]
    running = [seen for seen in running if seen.status.role == "trainer"] or running
    if not running:
        raise NoSuchPeer(f"no peer {f'of run {run} ' if run else ''}runs on this machine; see `tt status`")
    if run is None and len(running) > 1:
        names = ", ".join(sorted({seen.status.run for seen in running}))
        raise UsageError(f"{len(running)} peers run on this machine: name the run of one ({names})")
    for seen in running:
        answer = ask(seen.slot.socket, request)
        if answer.get("ok") is not True:
            raise TTError(f"{seen.status.run}: {answer.get('words')}")
        print(f"{seen.status.run}: {answer.get('words')}", flush=True)
    return 0


def _seconds(text: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text}: must be a time such as 45m, 2h or 1h30m")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= 366 * UNITS["d"]:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 366d")
    return seconds

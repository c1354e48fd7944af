"""`tt monitor RUN`: watch a swarm without being part of it."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

EXAMPLES = """\
tt monitor emoji                             live, until Ctrl-C
tt monitor emoji --json                      one snapshot
tt monitor emoji --plain --watch >> log.txt  a few lines at every step
tt monitor run.toml --peer /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt monitor` takes."""
    parser.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument(
        "--peer",
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="ask this peer (may be given several times); "
        "default: the run file's initial peers, else an aux peer of this run on this machine",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one snapshot as a JSON object and end")
    form.add_argument(
        "--plain", action="store_true", help="print one snapshot as text and end; so too without a terminal"
    )
    parser.add_argument(
        "--watch", action="store_true", help="with --json or text: go on, and print again at each change"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="time between two looks (default 2)"
    )
    parser.epilog = f"{parser.epilog}\n\n{_schema()}"


def run(args: argparse.Namespace) -> int:
    """Show the swarm. Ctrl-C ends with exit code 0."""
    from tt_cli.monitor import Snapshot, take_snapshot
    from tt_cli.monitor.terminal import follow
    from tt_cli.run import load_run
    from tt_cli.supervisor.screen import output_mode

    config = load_run(args.run)
    peers = _peers_to_ask(config, args.peer, args.run)
    mode = output_mode(sys.stdout, plain=args.plain or args.watch, json=args.json)
    with contextlib.suppress(KeyboardInterrupt):
        from tt_cli.swarm.observer import Observer

        if mode == "live":
            print(f"asking {len(peers)} peer(s) of {config.identity} …", file=sys.stderr)
        with Observer(config, peers) as observer:

            def look() -> Snapshot:
                return take_snapshot(config, observer.records(), observer.history(), time.time())

            follow(look, sys.stdout, mode, interval=args.interval, watch=args.watch)
    return 0


def _peers_to_ask(config: RunConfig, flags: list[str], name: str) -> list[str]:
    from tt_cli.cli.join import initial_peers
    from tt_cli.errors import UsageError

    known = initial_peers(config, flags)
    if not known:
        raise UsageError(
            f"no peer of run {name} is known to ask: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {name}` shows it), or name it in the run file under [peers] initial"
        )
    return known


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0.1 to 3600 seconds")
    return seconds


def _schema() -> str:
    from tt_cli.monitor.snapshot import PEER_FIELDS, SNAPSHOT_FIELDS

    width = max(map(len, [*SNAPSHOT_FIELDS, *PEER_FIELDS])) + 2
    lines = ["--json prints one object:"]
    for name, meaning in SNAPSHOT_FIELDS.items():
        lines.append(f"  {name:<{width}}{meaning}")
        if name == "peers":
            lines += [f"    {field:<{width}}{words}" for field, words in PEER_FIELDS.items()]
    return "\n".join(lines)

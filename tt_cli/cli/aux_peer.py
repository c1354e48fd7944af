"""`tt aux-peer RUN`: keep a run alive from a machine without a GPU."""

from __future__ import annotations

import argparse
import sys

from tt_cli.cli.join import add_network_arguments, add_screen_arguments, checked_peers

EXAMPLES = """\
tt aux-peer emoji
tt aux-peer my-run.toml --port 31337 --announce /ip4/203.0.113.7/tcp/31337
tt aux-peer emoji --json > events.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt aux-peer` takes."""
    parser.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument(
        "--peer",
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="another aux peer of this run, to keep one swarm together; default: the run file's initial peers",
    )
    add_network_arguments(parser, default_port=None)
    add_screen_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Supervise an auxiliary peer's process until the user ends it."""
    from tt_cli import __version__
    from tt_cli.auth import current_user
    from tt_cli.peer.screen import Screen
    from tt_cli.run import folders, load_run
    from tt_cli.supervisor.control import Control
    from tt_cli.supervisor.limits import Limits
    from tt_cli.supervisor.process import Worker
    from tt_cli.supervisor.slot import AUX, claim_slot
    from tt_cli.supervisor.status import new_status
    from tt_cli.supervisor.supervise import supervise

    config = load_run(args.run)
    port = config.peers.coordinator_port if args.port is None else args.port
    options = {
        "run": config.to_toml(),
        "initial_peers": checked_peers(args.peer) or list(config.peers.initial),
        "host": args.host,
        "port": port,
        "announce": args.announce,
        "user": current_user() or "",
    }
    slot = claim_slot(folders.run_folder(config), AUX)
    status = new_status(args.run, config.identity, "aux", config.schedule.total_steps, __version__)
    status.log = str(slot.log)
    title = f"tt aux-peer {args.run}"
    with (
        Control(slot, status, Limits(), by_hand=sys.stdin.isatty()) as control,
        Screen(
            title,
            config.identity,
            config.schedule.total_steps,
            join_run=args.run,
            plain=args.plain,
            json=args.json,
        ) as screen,
    ):
        supervise(lambda: Worker("tt_cli.auxiliary", options, slot.log), screen, control)
    return 0

"""`tt identity ACTION RUN`: the keys by which the swarm knows this machine's peers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """\
tt identity show emoji
tt identity export emoji my-peer.json
tt identity import emoji my-peer.json          on another machine, or after this one was set up anew"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, words in (
        ("show", "list them by their peer ids"),
        ("export", "write them into one file, readable by you alone"),
        ("import", "put an exported file's in place"),
    ):
        made = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", allow_abbrev=False)
        made.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
        if name == "show":
            made.add_argument("--json", action="store_true", help='{"trainer": PEER_ID, …}')
        else:
            made.add_argument("file", type=Path, metavar="FILE", help="whoever has it can pose as your peer")
            made.add_argument("--force", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    from tt_cli.auth import identities
    from tt_cli.run import load_run

    config = load_run(args.run)
    if args.action == "export":
        found = identities.export_identities(config, args.file, force=args.force)
        print(f"Written to {args.file}; use each on one machine at a time:")
    elif args.action == "import":
        found = identities.import_identities(config, args.file, force=args.force)
        print("In place:")
    else:
        found = identities.identities(config)
        if args.json:
            print(json.dumps(found))
            return 0
        if not found:
            print(f"No identity of run {config.run.name} here yet: joining makes one.")
    for name, peer_id in found.items():
        print(f"  {name:<10} {peer_id}")
    return 0

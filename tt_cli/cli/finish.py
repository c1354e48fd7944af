"""`tt finish`: have a running peer end after the current global step."""

from __future__ import annotations

import argparse

EXAMPLES = """\
tt finish
tt finish emoji"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt finish` takes."""
    from tt_cli.cli.status import add_run_argument

    add_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for it, print what happens now."""
    from tt_cli.cli.pause import tell

    return tell(args.run, {"command": "finish"})

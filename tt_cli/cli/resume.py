"""`tt resume`: take `tt pause` and `tt finish` back."""

from __future__ import annotations

import argparse

EXAMPLES = """\
tt resume
tt resume emoji"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt resume` takes."""
    from tt_cli.cli.status import add_run_argument

    add_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for it, print what happens now."""
    from tt_cli.cli.pause import tell

    return tell(args.run, {"command": "resume"})

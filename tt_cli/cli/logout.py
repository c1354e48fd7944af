"""`tt logout`: forget the Hugging Face login of this machine."""

from __future__ import annotations

import argparse

EXAMPLES = "tt logout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`tt logout` has no flags of its own."""


def run(args: argparse.Namespace) -> int:
    """Log out; says so when a token in the environment still counts."""
    from tt_cli import auth
    from tt_cli.errors import TTError

    print("Logged out." if auth.logout() else "Nobody was logged in.")
    if auth.token_source() == "environment":
        raise TTError("HF_TOKEN is set and still logs you in: unset it")
    return 0

"""`tt login`: log in to Hugging Face, in the browser or with a token."""

from __future__ import annotations

import argparse
import sys

ASK = "-"

EXAMPLES = """\
tt login                      log in with a browser (or choose to paste a token)
tt login --token              paste a token; it is not shown
tt login --token < token.txt  take the token from a file"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `tt login`."""
    parser.add_argument(
        "--token",
        nargs="?",
        const=ASK,
        help="log in with an access token; without a value it is asked for, or read from standard input",
    )


def run(args: argparse.Namespace) -> int:
    """Log in and say as whom."""
    from tt_cli import auth
    from tt_cli.cli.whoami import describe

    auth.login(_asked_for_token() if args.token == ASK else args.token)
    if auth.token_source() == "environment":
        print("The login is stored, but HF_TOKEN is set and wins over it: unset HF_TOKEN to use the login.")
    print(describe(auth.whoami()))
    return 0


def _asked_for_token() -> str:
    from getpass import getpass

    from tt_cli.errors import UsageError

    if sys.stdin.isatty():
        token = getpass("Access token (it is not shown): ")
    else:
        token = sys.stdin.readline()
    if not token.strip():
        raise UsageError("no token was given; make one in the settings of your Hugging Face account")
    return token.strip()

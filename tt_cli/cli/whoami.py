"""`tt whoami`: the Hugging Face account in use and its organisations."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.auth import User

EXAMPLES = """\
tt whoami
tt whoami --json              {"name", "full_name", "organisations": [{"name", "role"}], "token"}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `tt whoami`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print who is logged in; exit code 1 when nobody is."""
    from tt_cli import auth

    user = auth.whoami()
    if args.json:
        print(json.dumps({**user.model_dump(), "token": auth.token_source()}))
    else:
        print(describe(user))
    return 0


def describe(user: User) -> str:
    """Say who is logged in, from where, and with which organisations."""
    from tt_cli import auth

    source = " (by HF_TOKEN)" if auth.token_source() == "environment" else ""
    lines = [f"Logged in as {user.name}{source}."]
    if user.organisations:
        lines.append("Organisations:")
        lines += [f"  {one.name}  {one.role or ''}".rstrip() for one in user.organisations]
    else:
        lines.append("No organisations.")
    return "\n".join(lines)

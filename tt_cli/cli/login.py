"""`tt login`, `tt logout`, `tt whoami`: the Hugging Face account; `tt identity`: the keys of this machine's peers."""

from __future__ import annotations

import json as codec
import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tt_cli.cli.main import app
from tt_cli.cli.options import Force, Json, OptionalValues, Run, argument, option, switch
from tt_cli.errors import TTError, UsageError

if TYPE_CHECKING:
    from tt_cli.auth.account import User

LOGIN_EXAMPLES = """\
tt login                      log in with a browser (or choose to paste a token)
tt login --token              paste a token; it is not shown
tt login --token < token.txt  take the token from a file"""
WHOAMI_EXAMPLES = """\
tt whoami
tt whoami --json              {"name", "full_name", "organisations": [{"name", "role"}], "token"}"""
IDENTITY_EXAMPLES = """\
tt identity show emoji
tt identity export emoji my-peer.json
tt identity import emoji my-peer.json          on another machine, or after this one was set up anew"""


@app.command(epilog=LOGIN_EXAMPLES, cls=OptionalValues)
def login(
    token: Annotated[
        str | None,
        option("[TOKEN]", "log in with an access token; without a value it is asked for, or read from standard input"),
    ] = None,
) -> None:
    """Log in and say as whom."""
    from tt_cli.auth import account

    if token in ("", "-"):
        token = (getpass("Access token (it is not shown): ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
        if not token:
            raise UsageError("no token was given; make one in the settings of your Hugging Face account")
    account.login(token)
    if account.token_source() == "environment":
        print("The login is stored, but HF_TOKEN is set and wins over it: unset HF_TOKEN to use the login.")
    print(describe(account.whoami()))


@app.command(epilog="tt logout")
def logout() -> None:
    """Log out; says so when a token in the environment still counts."""
    from tt_cli.auth import account

    print("Logged out." if account.logout() else "Nobody was logged in.")
    if account.token_source() == "environment":
        raise TTError("HF_TOKEN is set and still logs you in: unset it")


@app.command(epilog=WHOAMI_EXAMPLES)
def whoami(json: Json = False) -> None:
    """Print who is logged in; exit code 1 when nobody is."""
    from tt_cli.auth import account

    user = account.whoami()
    if json:
        print(codec.dumps({**user.model_dump(), "token": account.token_source()}))
    else:
        print(describe(user))


def describe(user: User) -> str:
    """Say who is logged in, from where, and with which organisations."""
    from tt_cli.auth import account

    source = " (by HF_TOKEN)" if account.token_source() == "environment" else ""
    names = [f"  {membership.name}  {membership.role or ''}".rstrip() for membership in user.organisations]
    heading = "Organisations:" if names else "No organisations."
    return "\n".join([f"Logged in as {user.name}{source}.", heading, *names])


identity = typer.Typer(epilog=IDENTITY_EXAMPLES)
app.add_typer(identity, name="identity")

KeyFile = Annotated[Path, argument("FILE", "whoever has it can pose as your peer")]


@identity.command(help="List them by their peer ids.")
def show(run: Run, json: Annotated[bool, switch("--json", '{"trainer": PEER_ID, …}')] = False) -> None:
    """Print the identities that this machine has."""
    from tt_cli.auth import identities
    from tt_cli.run import load_run

    config = load_run(run)
    peer_ids = identities.identities(config)
    if json:
        print(codec.dumps(peer_ids))
    elif not peer_ids:
        print(f"No identity of run {config.run.name} here yet: joining makes one.")
    else:
        _print_identities(peer_ids)


@identity.command("export", help="Write them into one file, readable by you alone.")
def export_identities(run: Run, file: KeyFile, force: Force = False) -> None:
    """Write the file, print what is in it."""
    from tt_cli.auth import identities
    from tt_cli.run import load_run

    peer_ids = identities.export_identities(load_run(run), file, force=force)
    print(f"Written to {file}; use each on one machine at a time:")
    _print_identities(peer_ids)


@identity.command("import", help="Put an exported file's in place.")
def import_identities(run: Run, file: KeyFile, force: Force = False) -> None:
    """Read the file, print what it held."""
    from tt_cli.auth import identities
    from tt_cli.run import load_run

    peer_ids = identities.import_identities(load_run(run), file, force=force)
    print("In place:")
    _print_identities(peer_ids)


def _print_identities(peer_ids: dict[str, str]) -> None:
    for name, peer_id in peer_ids.items():
        print(f"  {name:<10} {peer_id}")

"""`tt authority ACTION RUN`: issue a closed run's passes, ban, and give orders. For the organiser, on one host."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.auth.authority.organiser import Organiser
    from tt_cli.run import RunConfig

EXAMPLES = """\
tt authority init my-run.toml --url https://passes.example.org
tt authority serve my-run.toml                 then share my-run.toml with the two lines of `init`
tt authority ban my-run.toml mallory --reason "poisoned gradients"
tt authority pause my-run.toml "disk full at the data set's host"
tt authority rollback my-run.toml 1200         to the checkpoint that the auxiliary peer on this host kept
tt authority backup my-run.toml authority-2026-01-31.json

`tt authority ACTION --help` says more about each. Bans and orders reach every peer within a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, words: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", allow_abbrev=False)
        made.add_argument("run", metavar="RUN", help="TOML file, ORGANISATION/REPOSITORY, or built-in name")
        return made

    init = action("init", "make the run's authority, and print what belongs into the run file")
    init.add_argument("--url", metavar="URL", default="https://HOST", help="where volunteers will reach it")
    init.add_argument("--database", metavar="URL", help="postgresql://USER:PASSWORD@HOST/NAME; default: a SQLite file")
    init.add_argument("--new-database", action="store_true", help="begin an empty database for the keys that are here")
    add_serve_arguments(action("serve", "answer volunteers' requests until Ctrl-C"))
    for name, words in (("ban", "take a user's or peer's pass away and give no other"), ("unban", "take a ban back")):
        made = action(name, words)
        who = made.add_mutually_exclusive_group(required=True)
        who.add_argument("user", nargs="?", metavar="USER", help="a user's name on the Hub: all peers of theirs")
        who.add_argument("--peer", metavar="PEER_ID", help="one peer")
        if name == "ban":
            made.add_argument("--reason", default="", metavar="WORDS", help="for the list of bans")
    for name, words in (("bans", "list who is banned"), ("members", "list the peers that have had a pass")):
        action(name, words).add_argument("--json", action="store_true", help="one JSON object a line")
    audit = action("audit", "list who joined, who was refused, and what the organiser did")
    audit.add_argument("--last", type=int, default=50, metavar="N", help="so many entries (default 50)")
    audit.add_argument("--json", action="store_true", help='{"at", "who", "what", "peer_id", "detail"} a line')
    action("pause", "have the whole swarm wait").add_argument("reason", metavar="REASON", help="why, for every screen")
    action("resume", "have the swarm go on")
    back = action("rollback", "have the whole swarm go back to a checkpoint")
    back.add_argument("step", type=int, metavar="STEP", help="its global step")
    words = "of the state at that step; read from the checkpoint on this host when left out"
    back.add_argument("digest", metavar="DIGEST", nargs="?", default="", help=words)
    words = "where it lies beside peers' own disks: OWNER/REPOSITORY[@REVISION] on the Hub"
    back.add_argument("--source", default="", help=words)
    rotate = action("rotate", "change the signing key")
    when = rotate.add_mutually_exclusive_group(required=True)
    when.add_argument("--until", metavar="DAY", help="take the old key until that day begins (UTC), e.g. 2026-12-01")
    when.add_argument("--now", action="store_true", help="it has leaked: everyone needs the new run file at once")
    for name, words in (("backup", "write keys and database into one file"), ("restore", "put a backup in place")):
        made = action(name, words)
        made.add_argument("file", type=Path, metavar="FILE", help="it holds the signing keys: keep it safe")
        made.add_argument("--force", action="store_true", help="replace what is there")
        if name == "restore":
            made.add_argument("--database", metavar="URL", help="into this one instead of the backup's")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is served."""
    parser.add_argument("--host", default="0.0.0.0", metavar="IP", help="address to listen on (default all)")
    parser.add_argument("--port", type=int, default=8470, metavar="N", help="TCP port (default 8470)")
    parser.add_argument(
        "--trusted-proxy",
        default="",
        metavar="IP",
        help="believe X-Forwarded-For from this address, of your HTTPS proxy; default: from nobody",
    )
    parser.add_argument(
        "--pass-minutes", type=_minutes, default=60.0, metavar="N", help="life of a pass, 1 to 1440 (default 60)"
    )
    parser.add_argument(
        "--most-peers", type=int, default=64, metavar="N", help="peers of one user at the same time (default 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    from tt_cli.run import load_run

    config = load_run(args.run)
    match args.action:
        case "init":
            return _init(config, args)
        case "serve":
            return _serve(config, args)
        case "backup":
            from tt_cli.auth.authority.authority_backup import back_up

            back_up(config, args.file, time.time(), force=args.force)
            print(f"Keys and database are in {args.file}. Whoever has it can issue passes: keep it safe.")
            return 0
        case "restore":
            from tt_cli.auth.authority.authority_backup import restore

            at = restore(config, args.file, time.time(), database=args.database, force=args.force)
            print(f"Restored as of {at}. Bans and orders after that are not in it: look at `tt authority bans`.")
            return 0
    from tt_cli.auth.authority.organiser import Organiser

    with Organiser.at_work(config) as organiser:
        _ACTIONS[args.action](organiser, args)
    return 0


def _init(config: Any, args: argparse.Namespace) -> int:
    from tt_cli.auth.authority.authority_folder import AuthorityFolder
    from tt_cli.auth.authority.authority_server import found, found_database
    from tt_cli.run import toml

    folder = AuthorityFolder(config)
    if folder.exists and args.new_database:
        found_database(folder)
    else:
        found(config, args.database or "")
    print(f"The keys are in {folder.file}: `tt authority backup` makes a copy. The run file's [membership] needs:\n")
    print(f"authority = {toml.toml_value(args.url)}\nauthority_key = {toml.toml_value(folder.settings().line())}")
    return 0


def _serve(config: Any, args: argparse.Namespace) -> int:
    import contextlib

    from tt_cli.auth.authority.authority_server import AuthorityServer

    server = AuthorityServer(serve_options(config, args))
    facts = server.authority.facts()
    print(
        f"The authority of {facts['run']} listens on port {server.port}; its key: {facts['authority_key']}", flush=True
    )
    if warning := key_warning(config, facts["authority_key"]):
        print(warning, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0


def serve_options(config: Any, args: argparse.Namespace) -> Any:
    """What a server's process needs, from the flags."""
    from tt_cli.auth.authority.authority_server import ServeOptions

    return ServeOptions(
        run=config.to_toml(),
        host=args.host,
        port=args.port,
        trusted_proxy=args.trusted_proxy,
        pass_seconds=args.pass_minutes * 60,
        most_peers=args.most_peers,
    )


def key_warning(config: Any, line: str) -> str:
    """What is wrong when the run file names another key; "" when it does not."""
    if config.membership.authority_key == line:
        return ""
    return f'The run file does not name this key: put authority_key = "{line}" into its [membership], and share it.'


def _ban(organiser: Organiser, args: argparse.Namespace) -> None:
    kind, name = ("peer", args.peer) if args.peer else ("user", args.user)
    organiser.ban(kind, name, args.reason)
    print(f"Banned {kind} {name}. Every peer knows within a minute.")


def _unban(organiser: Organiser, args: argparse.Namespace) -> None:
    kind, name = ("peer", args.peer) if args.peer else ("user", args.user)
    organiser.unban(kind, name)
    print(f"{kind.capitalize()} {name} may join again.")


def _bans(organiser: Organiser, args: argparse.Namespace) -> None:
    _list(args, organiser.bans(), lambda one: f"{_at(one['at'])}  {one['kind']}  {one['name']}  {one['reason']}")


def _members(organiser: Organiser, args: argparse.Namespace) -> None:
    now = time.time()
    _list(
        args,
        [vars(one) for one in organiser.members()],
        lambda one: (
            f"{one['user']}  {one['peer_id']}  since {_at(one['joined'])} by {one['way']}  "
            f"{'pass until ' + _at(one['expires']) if one['expires'] > now else 'pass expired'}"
        ),
    )


def _audit(organiser: Organiser, args: argparse.Namespace) -> None:
    entries = [{name: value for name, value in one.items() if name != "id"} for one in organiser.audit(args.last)]
    _list(
        args, entries, lambda one: f"{_at(one['at'])}  {one['who']}  {one['what']}  {one['peer_id']}  {one['detail']}"
    )


def _pause(organiser: Organiser, args: argparse.Namespace) -> None:
    organiser.pause(args.reason)
    print("The swarm pauses within a minute; `tt authority resume` lets it go on.")


def _resume(organiser: Organiser, args: argparse.Namespace) -> None:
    organiser.resume()
    print("The swarm goes on within a minute.")


def _rollback(organiser: Organiser, args: argparse.Namespace) -> None:
    from tt_cli.run import load_run

    digest = args.digest or _digest_here(load_run(args.run), args.step)
    order = organiser.roll_back(args.step, digest, args.source)
    print(f"Order {order}: every peer goes back to step {args.step} within a minute.")


def _digest_here(run: RunConfig, step: int) -> str:
    """Of the checkpoint that a peer on this host kept. Raises UsageError where there is none."""
    from tt_cli.checkpoint import CheckpointError, load
    from tt_cli.errors import UsageError
    from tt_cli.run import folders

    folder = folders.checkpoints(run)
    try:
        return load(folder / f"step-{step:08d}.safetensors").digest()
    except CheckpointError as error:
        there = sorted(int(path.name[5:-12]) for path in folder.glob("step-*.safetensors"))
        known = f"it holds steps {', '.join(map(str, there))}" if there else "there is none"
        raise UsageError(
            f"no usable checkpoint of step {step} in {folder} ({known}): name one of those, or DIGEST and --source"
        ) from error


def _rotate(organiser: Organiser, args: argparse.Namespace) -> None:
    settings = organiser.rotate(args.until)
    print(f'The run file\'s [membership] needs, and everyone that run file:\n\nauthority_key = "{settings.line()}"')
    print("\nMake a new backup too: the last one does not hold the new key.")


_ACTIONS: dict[str, Callable[[Organiser, argparse.Namespace], None]] = {
    "ban": _ban,
    "unban": _unban,
    "bans": _bans,
    "members": _members,
    "audit": _audit,
    "pause": _pause,
    "resume": _resume,
    "rollback": _rollback,
    "rotate": _rotate,
}


def _list(args: argparse.Namespace, entries: list[dict[str, Any]], words: Callable[[dict[str, Any]], str]) -> None:
    for entry in entries:
        print(json.dumps(entry) if args.json else words(entry).rstrip())
    if not entries and not args.json:
        print("None.")


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _minutes(text: str) -> float:
    number = float(text)
    if not 1 <= number <= 1440:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to 1440 minutes")
    return number

"""`tt authority ACTION RUN`: issue a closed run's passes, ban, and give orders. For the organiser, on one host."""

from __future__ import annotations

import contextlib
import json as codec
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tt_cli.cli.main import app
from tt_cli.cli.options import Force, Run, argument, exclusive, option, setting, switch
from tt_cli.errors import UsageError
from tt_cli.terminal.format import printable

if TYPE_CHECKING:
    from tt_cli.auth.authority.organiser import Organiser

EXAMPLES = """\
tt authority init my-run.toml --url https://passes.example.org
tt authority serve my-run.toml                 then share my-run.toml with the two lines of `init`
tt authority ban my-run.toml mallory --reason "poisoned gradients"
tt authority pause my-run.toml "disk full at the data set's host"
tt authority rollback my-run.toml 1200         to the checkpoint that the auxiliary peer on this host kept
tt authority backup my-run.toml authority-2026-01-31.json

`tt authority ACTION --help` says more about each. Bans and orders reach every peer within a minute."""

authority = typer.Typer(epilog=EXAMPLES)
app.add_typer(authority, name="authority")

User = Annotated[str | None, argument("USER", "a user's name on the Hub: all peers of theirs")]
Peer = Annotated[str | None, option("PEER_ID", "one peer", flag="--peer")]
JsonLines = Annotated[bool, switch("--json", "one JSON object a line")]
BackupFile = Annotated[Path, argument("FILE", "it holds the signing keys: keep it safe")]


@authority.command(help="Make the run's authority, and print what belongs into the run file.")
def init(
    run: Run,
    url: Annotated[str, option("URL", "where volunteers will reach it")] = "https://HOST",
    database: Annotated[str, option("URL", "postgresql://USER:PASSWORD@HOST/NAME; default: a SQLite file")] = "",
    new_database: Annotated[
        bool, switch("--new-database", "begin an empty database for the keys that are here")
    ] = False,
) -> None:
    """Make keys and database, or the database alone."""
    from tt_cli.auth.authority.authority_folder import AuthorityFolder
    from tt_cli.auth.authority.authority_server import found, found_database
    from tt_cli.run import load_run, toml

    config = load_run(run)
    folder = AuthorityFolder(config)
    if folder.exists and new_database:
        found_database(folder)
    else:
        found(config, database)
    print(f"The keys are in {folder.file}: `tt authority backup` makes a copy. The run file's [membership] needs:\n")
    print(f"authority = {toml.toml_value(url)}\nauthority_key = {toml.toml_value(folder.settings().line())}")


@authority.command(help="Answer volunteers' requests until Ctrl-C.")
def serve(
    run: Run,
    host: Annotated[str, option("IP", "address to listen on (default all)")] = "0.0.0.0",
    port: Annotated[int, setting("port", "N", "TCP port (default 8470)")] = 8470,
    trusted_proxy: Annotated[
        str, option("IP", "believe X-Forwarded-For from this address, of your HTTPS proxy; default: from nobody")
    ] = "",
    pass_minutes: Annotated[float, option("N", "life of a pass, 1 to 1440 (default 60)", min=1, max=1440)] = 60.0,
    most_peers: Annotated[int, option("N", "peers of one user at the same time (default 4)", min=1)] = 4,
) -> None:
    """Serve until the user ends it."""
    from tt_cli.auth.authority.authority_server import AuthorityServer, ServeOptions
    from tt_cli.run import load_run

    config = load_run(run)
    options = ServeOptions(config.to_toml(), host, port, trusted_proxy, pass_minutes * 60, most_peers)
    server = AuthorityServer(options)
    facts = server.authority.facts()
    key = facts.authority_key
    print(f"The authority of {facts.run} listens on port {server.port}; its key: {key}", flush=True)
    if config.membership.authority_key != key:
        fix = f'put authority_key = "{key}" into its [membership], and share it'
        print(f"The run file does not name this key: {fix}.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


@authority.command(help="Take a user's or peer's pass away and give no other.")
def ban(
    run: Run,
    user: User = None,
    peer: Peer = None,
    reason: Annotated[str, option("WORDS", "for the list of bans")] = "",
) -> None:
    """Ban, and say whom."""
    kind, name = _subject(user, peer)
    with _organiser(run) as organiser:
        organiser.ban(kind, name, reason)
    print(f"Banned {kind} {name}. Every peer knows within a minute.")


@authority.command(help="Take a ban back.")
def unban(run: Run, user: User = None, peer: Peer = None) -> None:
    """Take it back, and say whose."""
    kind, name = _subject(user, peer)
    with _organiser(run) as organiser:
        welcome = organiser.unban(kind, name)
    needs = "" if welcome else " with a new key alone: members have proof that this one signed a wrong average"
    print(f"{kind.capitalize()} {name} may join again{needs}.")


@authority.command(help="List who is banned.")
def bans(run: Run, json: JsonLines = False) -> None:
    """Print a line for each ban."""
    with _organiser(run) as organiser:
        _list(
            json, organiser.store.bans(), lambda ban: f"{_at(ban['at'])}  {ban['kind']}  {ban['name']}  {ban['reason']}"
        )


@authority.command(help="List the peers that have had a pass.")
def members(run: Run, json: JsonLines = False) -> None:
    """Print a line for each peer."""

    def line(member: dict[str, Any]) -> str:
        held = f"pass until {_at(member['expires'])}" if member["expires"] > time.time() else "pass expired"
        return f"{member['user']}  {member['peer_id']}  since {_at(member['joined'])} by {member['way']}  {held}"

    with _organiser(run) as organiser:
        _list(json, [vars(member) for member in organiser.store.members()], line)


@authority.command(help="List who joined, who was refused, and what the organiser did.")
def audit(
    run: Run,
    last: Annotated[int, option("N", "so many (default 50); of more, half may be refusals", min=1, max=10**9)] = 50,
    json: Annotated[bool, switch("--json", '{"at", "who", "what", "peer_id", "detail"} a line')] = False,
) -> None:
    """Print a line for each entry, the newest last."""
    with _organiser(run) as organiser:
        entries = [{name: entry[name] for name in entry if name != "id"} for entry in organiser.store.trail(last)]
    words = "{who}  {what}  {peer_id}  {detail}".format_map
    _list(json, entries, lambda entry: f"{_at(entry['at'])}  {words(entry)}")


@authority.command(help="Have the whole swarm wait.")
def pause(run: Run, reason: Annotated[str, argument("REASON", "why, for every screen")]) -> None:
    """Give the order."""
    with _organiser(run) as organiser:
        organiser.pause(reason)
    print("The swarm pauses within a minute; `tt authority resume` lets it go on.")


@authority.command(help="Have the swarm go on.")
def resume(run: Run) -> None:
    """Give the order."""
    with _organiser(run) as organiser:
        organiser.resume()
    print("The swarm goes on within a minute.")


@authority.command(help="Have the whole swarm go back to a checkpoint.")
def rollback(
    run: Run,
    step: Annotated[int, argument("STEP", "its global step")],
    digest: Annotated[
        str, argument("DIGEST", "of the state at that step; read from the checkpoint on this host when left out")
    ] = "",
    source: Annotated[
        str, option("PLACE", "where it lies beside peers' own disks: OWNER/REPOSITORY[@REVISION] on the Hub")
    ] = "",
) -> None:
    """Give the order."""
    with _organiser(run) as organiser:
        order = organiser.roll_back(step, digest or _digest_here(run, step), source)
    print(f"Order {order}: every peer goes back to step {step} within a minute.")


@authority.command(help="Change the signing key.")
def rotate(
    run: Run,
    until: Annotated[str | None, option("DAY", "take the old key until that day begins (UTC), e.g. 2026-12-01")] = None,
    now: Annotated[bool, switch("--now", "it has leaked: everyone needs the new run file at once")] = False,
) -> None:
    """Make the key, and print what belongs into the run file."""
    exclusive(until=until, now=now)
    if until is None and not now:
        raise UsageError("which way? Give --until DAY, or --now where the key has leaked")
    with _organiser(run) as organiser:
        settings = organiser.rotate(until)
    print(f'The run file\'s [membership] needs, and everyone that run file:\n\nauthority_key = "{settings.line()}"')
    print("\nMake a new backup too: the last one does not hold the new key.")


@authority.command(help="Write keys and database into one file.")
def backup(run: Run, file: BackupFile, force: Force = False) -> None:
    """Write the file."""
    from tt_cli.auth.authority.authority_backup import back_up
    from tt_cli.run import load_run

    back_up(load_run(run), file, time.time(), force=force)
    print(f"Keys and database are in {file}. Whoever has it can issue passes: keep it safe.")


@authority.command(help="Put a backup in place.")
def restore(
    run: Run,
    file: BackupFile,
    force: Force = False,
    database: Annotated[str | None, option("URL", "into this one instead of the backup's")] = None,
) -> None:
    """Put it in place, and say of when it is."""
    from tt_cli.auth.authority import authority_backup
    from tt_cli.run import load_run

    at = authority_backup.restore(load_run(run), file, time.time(), database=database, force=force)
    print(f"Restored as of {at}. Bans and orders after that are not in it: look at `tt authority bans`.")


def _organiser(run: str) -> AbstractContextManager[Organiser]:
    """The organiser of a run whose authority is on this machine."""
    from tt_cli.auth.authority.organiser import Organiser
    from tt_cli.run import load_run

    return Organiser.at_work(load_run(run))


def _subject(user: str | None, peer: str | None) -> tuple[str, str]:
    """The kind and name of who is meant. Raises UsageError."""
    if (user is None) == (peer is None):
        raise UsageError("who? Give a USER, or one peer with --peer, not both")
    return ("user", user) if user is not None else ("peer", peer or "")


def _digest_here(run: str, step: int) -> str:
    """Of the checkpoint that a peer on this host kept. Raises UsageError where there is none."""
    from tt_cli.checkpoint.checkpoint_files import load
    from tt_cli.checkpoint.training_state import CheckpointError
    from tt_cli.run import folders, load_run

    folder = folders.checkpoints(load_run(run))
    try:
        return load(folder / f"step-{step:08d}.safetensors").digest()
    except CheckpointError as error:
        there = sorted(int(path.name[5:-12]) for path in folder.glob("step-*.safetensors"))
        known = f"it holds steps {', '.join(map(str, there))}" if there else "there is none"
        raise UsageError(
            f"no usable checkpoint of step {step} in {folder} ({known}): name one of those, or DIGEST and --source"
        ) from error


def _list(json: bool, entries: list[dict[str, Any]], line: Callable[[dict[str, Any]], str]) -> None:
    for entry in entries:
        print(codec.dumps(entry) if json else printable(line(entry).rstrip().replace("\n", " ")))
    if not entries and not json:
        print("None.")


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

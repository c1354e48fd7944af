"""`tt aux-peer RUN`: keep a run alive from a machine without a GPU."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tt_cli.cli.join import add_network_arguments, add_screen_arguments, checked_peers, port

if TYPE_CHECKING:
    from tt_cli.auth.authority.authority_process import AuthorityPart
    from tt_cli.auxiliary.evaluator_process import SamplesOptions
    from tt_cli.auxiliary.parts import Part
    from tt_cli.auxiliary.publisher import PublisherOptions
    from tt_cli.run import RunConfig
    from tt_cli.terminal.worker_screen import Screen

EVERY_STEPS = 100
EVERY_MINUTES = 30.0
EXAMPLES = """\
tt aux-peer emoji
tt aux-peer my-run.toml --port 31337 --announce /ip4/203.0.113.7/tcp/31337
tt aux-peer my-run.toml --authority --trusted-proxy 127.0.0.1
tt aux-peer emoji --web-port 80
tt aux-peer acme/my-run --publish --publish-every 60
tt aux-peer emoji --assist
tt aux-peer emoji --samples --samples-every 50 --prompt "red apple" --prompt owl
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
    parser.add_argument(
        "--database",
        metavar="URL",
        default="",
        help="where the run's history is kept: sqlite:///FILE or postgresql://HOST/NAME; with a password rather in "
        "TT_DATABASE, for others can read a command line; default: a SQLite file in the run's folder",
    )
    page = parser.add_argument_group("web page")
    page.add_argument(
        "--web-port", type=port, metavar="N", help="its TCP port (default 8471, the next free one where that is taken)"
    )
    page.add_argument("--no-web", action="store_true", help="serve none")
    publishing = parser.add_argument_group(
        "publishing", "to the repository that the run file names; also without a flag where somebody is logged in"
    )
    whether = publishing.add_mutually_exclusive_group()
    whether.add_argument("--publish", action="store_true", help="put checkpoints on the Hub, or say why not")
    whether.add_argument("--no-publish", action="store_true", help="leave them on this machine")
    publishing.add_argument(
        "--publish-every",
        type=_minutes,
        default=EVERY_MINUTES,
        metavar="MINUTES",
        help=f"at most one in so many (default {EVERY_MINUTES:g}); the run's last step at once",
    )
    assistant = parser.add_argument_group(
        "assistant", "takes part in averaging without training; starts by itself once all trainers are in client mode"
    )
    assists = assistant.add_mutually_exclusive_group()
    assists.add_argument("--assist", action="store_true", help="start it at once: peers in client mode need no others")
    assists.add_argument("--no-assist", action="store_true", help="never")
    assistant.add_argument(
        "--assist-port", type=port, metavar="N", help="its TCP port (default: the one after the aux peer's)"
    )
    samples = parser.add_argument_group("pictures along the way")
    samples.add_argument(
        "--samples", action="store_true", help="measure the held-out loss and draw, now and then, for the web page"
    )
    samples.add_argument(
        "--samples-every", type=_steps, metavar="STEPS", help=f"global steps in between (default {EVERY_STEPS})"
    )
    samples.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="draw this (may be given several times; default: some that suit the run's data)",
    )
    authority = parser.add_argument_group("authority")
    authority.add_argument(
        "--authority", action="store_true", help="also serve the run's authority, as `tt authority serve` does"
    )
    authority.add_argument("--authority-port", type=port, default=8470, metavar="N", help="its TCP port (default 8470)")
    authority.add_argument(
        "--trusted-proxy",
        default="",
        metavar="IP",
        help="believe X-Forwarded-For from this address, of your HTTPS proxy",
    )
    add_screen_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Supervise an auxiliary peer's process until the user ends it."""
    from tt_cli import __version__
    from tt_cli.auth.peer_admission import Admission
    from tt_cli.auxiliary.history.writer import DATABASE, database_url
    from tt_cli.auxiliary.parts import EVALUATOR, PUBLISHER, WEB_PAGE
    from tt_cli.auxiliary.standby import Standby
    from tt_cli.auxiliary.web_process import WebOptions
    from tt_cli.database import Database
    from tt_cli.errors import UsageError
    from tt_cli.monitor.views import SwarmLines
    from tt_cli.run import folders, load_run, name_for_others
    from tt_cli.supervisor.control import Control
    from tt_cli.supervisor.events import Log
    from tt_cli.supervisor.household.limits import HouseholdLimits
    from tt_cli.supervisor.peer_state import new_status
    from tt_cli.supervisor.slot import AUX, claim_slot, identity_name
    from tt_cli.supervisor.supervise import supervise
    from tt_cli.supervisor.worker_process import Worker
    from tt_cli.terminal.worker_screen import Screen

    config = load_run(args.run)
    if args.authority:
        _check_authority(config, args.run)
    database = args.database or os.environ.get(DATABASE, "")
    named = Database(database_url(folders.run_folder(config), database), "it")  # what is wrong is said at once
    if named.file is not None and not named.file.parent.is_dir():
        raise UsageError(f"--database: there is no folder {named.file.parent}")
    samples = _samples(config, args)
    publish, unpublished = _publishing(config, args)
    page = WebOptions(config.to_toml(), name_for_others(args.run, config), args.host, args.web_port)
    options: dict[str, Any] = {
        "run": config.to_toml(),
        "initial_peers": checked_peers(args.peer) or list(config.peers.initial),
        "host": args.host,
        "port": config.peers.coordinator_port if args.port is None else args.port,
        "announce": args.announce,
    }
    if args.assist_port is not None and args.no_assist:
        raise UsageError("--assist-port: there is no assistant with --no-assist")
    slot = claim_slot(folders.run_folder(config), AUX)
    status = new_status(args.run, config.identity, "aux", config.schedule.total_steps, __version__)
    status.log = str(slot.log)
    title = f"tt aux-peer {args.run}"

    def tell(line: str, level: str) -> None:
        screen.show(Log(line, level))

    def start() -> Worker:
        admitted.check()
        options["user"] = admitted.user
        worker = Worker("tt_cli.auxiliary", options, slot.log, {DATABASE: database})
        admitted.attach(worker)
        return worker

    def beside(part: Part, log: str, opts: object) -> AbstractContextManager[object]:
        return nullcontext() if opts is None else part.watched(vars(opts), slot.folder / log, screen.show, database)

    def assistant() -> AbstractContextManager[None]:
        return _assistant(config, args, options, slot.folder / "assistant.log", screen)

    with (
        Control(slot, status, HouseholdLimits(), by_hand=sys.stdin.isatty()) as control,
        Screen(
            title,
            config.identity,
            config.schedule.total_steps,
            join_run=name_for_others(args.run, config),
            plain=args.plain,
            json=args.json,
            draw_swarm=SwarmLines(),
        ) as screen,
        beside(WEB_PAGE, "web.log", None if args.no_web else page),
        beside(EVALUATOR, "evaluator.log", samples),
        beside(PUBLISHER, "publisher.log", publish),
        _authority(config, args, slot.folder / "authority.log", screen) if args.authority else nullcontext(),
        Admission(config, identity_name(slot), tell, here=True) as admitted,
        assistant() if args.assist else nullcontext(),
        Standby(config, screen, assistant) as standby,
    ):
        if unpublished:
            tell(unpublished, "info")
        supervise(start, screen if args.assist or args.no_assist else standby, control)
        admitted.check()
    return 0


def _steps(text: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of steps from 1")
    return number


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 10080:
        raise argparse.ArgumentTypeError(f"{text}: must be minutes, from 1 to 10080")
    return number


def _publishing(config: RunConfig, args: argparse.Namespace) -> tuple[PublisherOptions | None, str]:
    """What the publisher is to do, None without one; and a line about what could be and is not."""
    from tt_cli.auth.account import token_source
    from tt_cli.auxiliary.publisher import PublisherOptions
    from tt_cli.errors import UsageError

    repository = config.checkpoints.repository
    if args.no_publish or (repository is None and not args.publish):
        return None, ""
    if repository is None:
        raise UsageError('--publish: the run file names no repository: add [checkpoints] repository = "OWNER/NAME"')
    if token_source() is None:
        words = "nobody is logged in here: `tt login` with a token that may write there, or set HF_TOKEN"
        if args.publish:
            raise UsageError(f"--publish: {words}")
        return None, f"checkpoints stay on this machine and do not go to {repository}: {words}"
    return PublisherOptions(config.to_toml(), 60.0 * args.publish_every), ""


def _samples(config: RunConfig, args: argparse.Namespace) -> SamplesOptions | None:
    """What the evaluator is to do; None without --samples."""
    from tt_cli.auxiliary.evaluator_process import SamplesOptions, checked_prompts
    from tt_cli.errors import UsageError

    if not args.samples:
        if args.prompt or args.samples_every:
            raise UsageError("--prompt and --samples-every: add --samples, which switches drawing on")
        return None
    return SamplesOptions(config.to_toml(), args.samples_every or EVERY_STEPS, checked_prompts(config, args.prompt))


@contextmanager
def _assistant(
    config: RunConfig, args: argparse.Namespace, beside: dict[str, Any], log: Path, screen: Screen
) -> Iterator[None]:
    """The assistant, with a pass of its own where the run asks for one. beside: the coordinator's options."""
    from tt_cli.auth.peer_admission import Admission
    from tt_cli.auxiliary.parts import ASSISTANT, ASSISTANT_KEY, announced_beside, port_beside
    from tt_cli.supervisor.events import Log

    def tell(line: str, level: str) -> None:
        screen.show(Log(f"assistant: {line}", level))

    port = port_beside(beside["port"]) if args.assist_port is None else args.assist_port
    announce = announced_beside(args.announce, port)
    with Admission(config, ASSISTANT_KEY, tell, here=True) as admitted:
        options = {"run": config.to_toml(), "host": args.host, "port": port, "announce": announce}
        with ASSISTANT.watched({**options, "user": admitted.user}, log, screen.show) as part:
            admitted.attach(part)
            yield


def _check_authority(config: RunConfig, name: str) -> None:
    """Before anything is started: this machine's authority is the one that the run file names."""
    from tt_cli.auth.authority.authority_folder import AuthorityFolder
    from tt_cli.auth.peer_admission import is_here
    from tt_cli.errors import UsageError

    if config.membership.authority_key is None:
        raise UsageError(f"--authority: the run file names none; `tt authority init {name}` prints what it needs")
    if not AuthorityFolder(config).exists:
        raise UsageError(f"--authority: there is none on this machine: make one with `tt authority init {name}`")
    if not is_here(config):
        raise UsageError(
            "--authority: this machine's authority has another key than the run file; `tt authority restore` puts a "
            "backup in place"
        )


def _authority(config: RunConfig, args: argparse.Namespace, log: Path, screen: Screen) -> AuthorityPart:
    from tt_cli.auth.authority.authority_process import AuthorityPart
    from tt_cli.auth.authority.authority_server import ServeOptions

    options = ServeOptions(
        run=config.to_toml(), host=args.host, port=args.authority_port, trusted_proxy=args.trusted_proxy
    )
    return AuthorityPart(options, log, screen.show)

"""`tt monitor RUN`: watch a swarm without being part of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.monitor import SwarmSnapshot
    from tt_cli.monitor.page_client import Page
    from tt_cli.run import RunConfig

    Look = Callable[[], SwarmSnapshot]

EXAMPLES = """\
tt monitor emoji                             a full screen, until q; ? shows its keys
tt monitor emoji --from http://203.0.113.7:8471
tt monitor emoji --json                      one snapshot
tt monitor emoji --plain --watch >> log.txt  a few lines at every step
tt monitor run.toml --peer /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt monitor` takes."""
    parser.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument(
        "--peer",
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="ask this peer (may be given several times); "
        "default: the run file's initial peers, else an aux peer of this run on this machine",
    )
    parser.add_argument(
        "--from",
        dest="page",
        metavar="URL",
        help="ask an aux peer's web page: it knows all steps and who contributed what; without --peer it is asked for "
        "the present too. Default: the page of an aux peer of this run on this machine, for the past alone",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one snapshot as a JSON object and end")
    form.add_argument(
        "--plain", action="store_true", help="print one snapshot as text and end; so too without a terminal"
    )
    parser.add_argument(
        "--watch", action="store_true", help="with --json or text: go on, and print again at each change"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="time between two looks (default 2)"
    )
    parser.epilog = f"{parser.epilog}\n\n{_schema()}"


def run(args: argparse.Namespace) -> int:
    """Show the swarm. q or Ctrl-C ends with exit code 0."""
    from tt_cli.monitor.page_client import Page, page_here
    from tt_cli.monitor.snapshot_text import follow
    from tt_cli.run import folders, load_run
    from tt_cli.terminal.live_view import output_mode

    config = load_run(args.run)
    mode = output_mode(sys.stdout, plain=args.plain or args.watch or not sys.stdin.isatty(), json=args.json)
    log = folders.run_folder(config) / "monitor.log"
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as opened:
        url = args.page or (page_here(config) if mode == "live" else "")
        page = opened.enter_context(Page(url, config.identity)) if url else None
        look: Look
        if page is not None and args.page and not args.peer:
            page.snapshot()  # an address that is no page of this run is told before there is a screen
            look, source = page.snapshot, page.url
            if mode == "live":
                opened.enter_context(standard_error_in(log))
        else:
            peers = _peers_to_ask(config, args.peer, args.run)
            look, source = opened.enter_context(_swarm(config, peers, log if mode == "live" else None)), "the DHT"
        if mode == "live":
            _full_screen(config, args, look, source, page)
        else:
            follow(look, sys.stdout, mode, interval=args.interval, watch=args.watch)
    return 0


@contextlib.contextmanager
def _swarm(config: RunConfig, peers: list[str], log: Path | None) -> Iterator[Look]:
    """A client of the run's DHT. log: a file for what its processes say, where the screen is not theirs."""
    from tt_cli.auth.peer_admission import observing
    from tt_cli.monitor import take_snapshot

    def tell(line: str, level: str) -> None:
        print(f"tt: {line}", file=sys.stderr)

    with observing(config, tell):
        from tt_cli.swarm.observer import Observer

        if log is not None:
            print(f"asking {len(peers)} peer(s) of {config.identity} …", file=sys.stderr)
        with standard_error_in(log) if log else contextlib.nullcontext(), Observer(config, peers) as observer:

            def look() -> SwarmSnapshot:
                return take_snapshot(config, observer.records(), observer.history(), time.time())

            yield look


def _full_screen(config: RunConfig, args: argparse.Namespace, look: Look, source: str, page: Page | None) -> None:
    from tt_cli.monitor.monitor_app import MonitorApp
    from tt_cli.monitor.watch import SwarmWatch
    from tt_cli.run import folders

    def flops() -> int:
        from tt_cli.model import DalleConfig

        return DalleConfig.from_run(config).flops_per_sample()

    watch = SwarmWatch(
        args.run,
        config.identity,
        look,
        interval=args.interval,
        source=source,
        page=page,
        folder=folders.run_folder(config),
        flops=flops,
    )
    with watch:
        MonitorApp(watch, args.interval).run()
    print(watch.scene().summary())


@contextlib.contextmanager
def standard_error_in(file: Path) -> Iterator[None]:
    """What this process and its children write to standard error goes to `file` meanwhile: it would tear the screen."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, 2)
        os.close(target)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _peers_to_ask(config: RunConfig, flags: list[str], name: str) -> list[str]:
    from tt_cli.cli.join import initial_peers
    from tt_cli.errors import UsageError

    known = initial_peers(config, flags)
    if not known:
        raise UsageError(
            f"no peer of run {name} is known to ask: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {name}` shows it), or name it in the run file under [peers] initial"
        )
    return known


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0.1 to 3600 seconds")
    return seconds


def _schema() -> str:
    from tt_cli.swarm.records.snapshot import PEER_FIELDS, SNAPSHOT_FIELDS

    width = max(map(len, [*SNAPSHOT_FIELDS, *PEER_FIELDS])) + 2
    lines = ["--json prints one object:"]
    for name, meaning in SNAPSHOT_FIELDS.items():
        lines.append(f"  {name:<{width}}{meaning}")
        if name == "peers":
            lines += [f"    {field:<{width}}{words}" for field, words in PEER_FIELDS.items()]
    return "\n".join(lines)

"""`tt monitor RUN`: watch a swarm without being part of it; `tt site export RUN OUT`: its web page as files."""

from __future__ import annotations

import contextlib
import dataclasses
import json as codec
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tt_cli.cli.main import app
from tt_cli.cli.options import Json, Run, argument, exclusive, option, switch
from tt_cli.errors import TTError
from tt_cli.swarm.records.snapshot import PEER_FIELDS, SNAPSHOT_FIELDS
from tt_cli.terminal.format import clean, plural
from tt_cli.terminal.live_view import output_mode, standard_error_in

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.swarm.records.snapshot import SwarmSnapshot

    Look = Callable[[], SwarmSnapshot]

MONITOR_EXAMPLES = """\
tt monitor emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…    a full screen, until q; ? shows its keys
tt monitor emoji --from http://203.0.113.7:8471
tt monitor emoji                               where an aux peer of it runs on this machine
tt monitor org/run --json                      one snapshot
tt monitor org/run --plain --watch >> log.txt  a few lines at every step"""
SITE_EXAMPLES = """\
tt site export emoji site/
tt site export my-run.toml /srv/www/my-run        again and again, from cron: it replaces what it wrote before
tt site export org/run site/ --json

It shows what the aux peer on this machine has recorded up to now. The folder needs no server of its own: upload it,
under any path. --json prints {"folder", "step", "pictures", "files", "bytes"}."""


def _schema() -> str:
    width = max(map(len, [*SNAPSHOT_FIELDS, *PEER_FIELDS])) + 2
    lines = ["--json prints one object:"]
    for name, meaning in SNAPSHOT_FIELDS.items():
        lines.append(f"  {name:<{width}}{meaning}")
        if name == "peers":
            lines += [f"    {field:<{width}}{words}" for field, words in PEER_FIELDS.items()]
    return "\n".join(lines)


@app.command(epilog=f"{MONITOR_EXAMPLES}\n\n{_schema()}")
def monitor(
    run: Run,
    peer: Annotated[
        list[str] | None,
        option(
            "MULTIADDR",
            "ask this peer (may be given several times); default: the run file's initial peers, else an aux peer of "
            "this run on this machine",
        ),
    ] = None,
    page_url: Annotated[
        str,
        option(
            "URL",
            "ask an aux peer's web page: it knows all steps and who contributed what; without --peer it is asked for "
            "the present too. Default: the page of an aux peer of this run on this machine, for the past alone",
            flag="--from",
        ),
    ] = "",
    watch: Annotated[bool, switch("--watch", "with --json or text: go on, and print again at each change")] = False,
    interval: Annotated[float, option("SECONDS", "time between two looks (default 2)", min=0.1, max=3600)] = 2.0,
    json: Annotated[bool, switch("--json", "print one snapshot as a JSON object and end")] = False,
    plain: Annotated[bool, switch("--plain", "print one snapshot as text and end; so too without a terminal")] = False,
) -> None:
    """Show the swarm. q or Ctrl-C ends with exit code 0."""
    from tt_cli.monitor.page_client import Page, page_here
    from tt_cli.monitor.snapshot_text import follow
    from tt_cli.run import folders, load_run
    from tt_cli.run.initial_peers import peers_to_ask

    exclusive(json=json, plain=plain)
    config = load_run(run)
    mode = output_mode(sys.stdout, plain=plain or watch or not sys.stdin.isatty(), json=json)
    log = folders.run_folder(config) / "monitor.log"
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as opened:
        url = page_url or (page_here(config) if mode == "live" else "")
        page = opened.enter_context(contextlib.closing(Page(url, config.identity))) if url else None
        look: Look
        if page is not None and page_url and not peer:
            page.snapshot()  # an address that is no page of this run is told before there is a screen
            look, source = page.snapshot, page.url
            if mode == "live":
                opened.enter_context(standard_error_in(log))
        else:
            peers = peers_to_ask(config, peer or [], run)
            look, source = opened.enter_context(_swarm(config, peers, log if mode == "live" else None)), "the DHT"
        if mode != "live":
            follow(look, sys.stdout, mode, interval=interval, watch=watch)
            return
        from tt_cli.monitor.monitor_app import MonitorApp
        from tt_cli.monitor.watch import SwarmWatch
        from tt_cli.task import task_of

        watching = SwarmWatch(
            run,
            config.identity,
            look,
            interval=interval,
            source=source,
            page=page,
            folder=folders.run_folder(config),
            flops=task_of(config).flops(),
        )
        with watching:
            MonitorApp(watching, interval).run()
        print(watching.scene().summary())


@contextlib.contextmanager
def _swarm(config: RunConfig, peers: list[str], log: Path | None) -> Iterator[Look]:
    """A client of the run's DHT. log: a file for what its processes say, where the screen is not theirs."""
    from tt_cli.auth.peer_admission import observing
    from tt_cli.swarm.records.snapshot import take_snapshot

    with observing(config, lambda line, level: print(f"tt: {clean(line)}", file=sys.stderr)):
        from tt_cli.swarm.observer import Observer

        if log is not None:
            print(f"asking {len(peers)} peer(s) of {config.identity} …", file=sys.stderr)
        with standard_error_in(log) if log else contextlib.nullcontext(), Observer(config, peers) as observer:
            yield lambda: take_snapshot(config, observer.records(), observer.history(), time.time(), observer.notice())


site = typer.Typer(epilog=SITE_EXAMPLES)
app.add_typer(site, name="site")


@site.callback()
def _site() -> None:
    """Keep `export` a command of its own although it is the only one."""


@site.command(help="Write the run's web page into a folder.")
def export(
    run: Run,
    out: Annotated[Path, argument("OUT", "the folder: a new or empty one, or an earlier export")],
    database: Annotated[str, option("URL", "of the history (or TT_DATABASE); default: the run folder's file")] = "",
    json: Json = False,
) -> None:
    """Write it, and say what was written."""
    from tt_cli.history.reader import HistoryReader
    from tt_cli.history.writer import DATABASE, PICTURES, database_url
    from tt_cli.run import folders, load_run, name_for_others
    from tt_cli.web.queries import Answers
    from tt_cli.web.site_export import export as export_site

    config = load_run(run)
    folder = folders.run_folder(config)
    name, url = name_for_others(run, config), database_url(folder, database or os.environ.get(DATABASE, ""))
    with contextlib.closing(HistoryReader(url)) as reader:
        if reader.file is not None and not reader.file.is_file():  # SQLite would make an empty one
            raise TTError(f"nothing of run {run} is recorded in {reader.file}: `tt aux-peer {run}` records it")
        written = export_site(Answers(reader, config, name), folder / PICTURES, out)
    if json:
        print(codec.dumps(dataclasses.asdict(written)))
    else:
        size = f"{written.bytes / 1e6:.1f} MB in {written.files} files"
        print(f"{written.folder}: step {written.step:,}, {plural(written.pictures, 'picture')}, {size}")

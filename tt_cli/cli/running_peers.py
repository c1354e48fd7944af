"""`tt status`, `tt pause`, `tt resume`, `tt finish`: what the peers of this machine do, and having them do another."""

from __future__ import annotations

import json as codec
import os.path
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tt_cli.cli.main import app
from tt_cli.cli.options import Json, argument, option
from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.control_socket import NotRunning, ask
from tt_cli.terminal.live_view import output_mode

if TYPE_CHECKING:
    from tt_cli.supervisor.slot import SeenSlot

STATUS_EXAMPLES = """\
tt status
tt status emoji
tt status emoji --json | jq -r .peers[0].state

--json prints {"peers": […]}; each has running, answers, run, role, state, reason, since, until, step, peers, share,
samples_per_second, last_round, choices, limits, troubles, bytes_sent, bytes_received, started and more.
Exit code: 0 when a peer runs, 3 when none does."""
PAUSE_EXAMPLES = """\
tt pause                  until `tt resume`
tt pause emoji --for 2h
0 18 * * 1-5  tt pause emoji --for 4h     in a crontab: weekdays from 18:00 to 22:00"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """A time such as 45m, in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise typer.BadParameter(f"{text}: must be a time such as 45m, 2h or 1h30m")
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not 0 < total <= 366 * UNITS["d"]:
        raise typer.BadParameter(f"{text}: must be above 0 and at most 366d")
    return total


RunHere = Annotated[str | None, argument("RUN", "as given to `tt join`; default: whichever there is")]


@app.command(epilog=STATUS_EXAMPLES)
def status(run: RunHere = None, json: Json = False) -> None:
    """Print what is known of each peer; those that run first."""
    from tt_cli.run import folders
    from tt_cli.terminal.status_lines import status_lines

    peers = sorted(known_peers(run), key=lambda seen: (not seen.running, -seen.status.updated))
    if json:
        rows = [dict(running=p.running, answers=p.answers, **codec.loads(p.status.model_dump_json())) for p in peers]
        print(codec.dumps({"peers": rows}, indent=1))
    elif peers:
        live = output_mode(sys.stdout) == "live"
        console = Console(highlight=False, color_system="auto" if live else None, soft_wrap=True)
        blocks = [status_lines(seen, time.time(), console.width if live else 500) for seen in peers]
        console.print(Text("\n\n").join(Text("\n").join(lines) for lines in blocks))
    else:
        whose = f"of run {run} " if run else ""
        print(f"no peer {whose}has run on this machine (in {folders.home()}); `tt join {run or 'RUN'}` starts one")
    if not any(seen.running for seen in peers):
        raise typer.Exit(NotRunning.exit_code)


@app.command(epilog=PAUSE_EXAMPLES)
def pause(
    run: RunHere = None,
    duration: Annotated[
        float | None, option("TIME", "go on after it: 45m, 2h, 1h30m, 1d", parser=seconds, flag="--for")
    ] = None,
) -> None:
    """Ask for it, print what happens now."""
    tell(run, {"command": "pause", "seconds": duration})


@app.command(epilog="tt resume\ntt resume emoji")
def resume(run: RunHere = None) -> None:
    """Take `tt pause` and `tt finish` back."""
    tell(run, {"command": "resume"})


@app.command(epilog="tt finish\ntt finish emoji")
def finish(run: RunHere = None) -> None:
    """Have a peer end after the current global step."""
    tell(run, {"command": "finish"})


def tell(run: str | None, request: dict[str, Any]) -> None:
    """Send `request` to the peers of a run, or to the only one, and print what each answers.

    An aux peer of the run is meant only where no trainer of it runs. Raises NotRunning, UsageError; TTError when
    peers refuse or do not answer, after all have been told.
    """
    running = [seen for seen in known_peers(run) if seen.running]
    running = [seen for seen in running if seen.status.role == "trainer"] or running
    if not running:
        raise NotRunning(f"no peer {f'of run {run} ' if run else ''}runs on this machine; see `tt status`")
    if run is None and len(running) > 1:
        names = ", ".join(sorted({seen.status.run for seen in running}))
        raise UsageError(f"{len(running)} peers run on this machine: name the run of one ({names})")
    failures = list[TTError]()
    for seen in running:  # one that hangs keeps no other from hearing it
        try:
            answer = ask(seen.slot.socket, request)
            if answer.get("ok") is not True:
                raise TTError(f"{seen.status.run}: {answer.get('words')}")
            print(f"{seen.status.run}: {answer.get('words')}", flush=True)
        except TTError as error:
            failures.append(error)
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


def known_peers(run: str | None) -> list[SeenSlot]:
    """Those of `run`, or all, that run on this machine or have left their status."""
    from tt_cli.run import folders, load_run
    from tt_cli.supervisor.slot import look_at, slots_in

    names = {load_run(run).identity if run is not None and os.path.isfile(run) else run}
    peers = [seen for slot in slots_in(folders.home()) if (seen := look_at(slot)) is not None]
    if run is None:
        return peers
    return [seen for seen in peers if names & {seen.status.run, seen.status.identity, seen.slot.folder.name}]

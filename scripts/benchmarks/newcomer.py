"""Time a newcomer's path from a fresh clone: to a first picture, to a swarm of two machines, to a run of one's own.

Commands are those of README.md and docs/organise.md, typed without a pause; reading and thinking are not in it.
Machines are network namespaces with links of 100 Mbit/s each way (needs root and iproute2) and a $TT_HOME each; they
share the cores of this one, so that each has fewer than a real one.

- first picture: `git clone`, `scripts/demo` (which sets everything up); until the picture of the swarm that it trained;
- two machines: `tt aux-peer`, and `tt join` on both with the line that it printed; until both have made a step;
- a run of one's own: `tt init`, `tt check`, `tt aux-peer`, `tt join`; until its first step.

    scripts/bench newcomer                   # a quarter of an hour; Python packages come over this machine's line
    scripts/bench newcomer --quick --json    # the own run alone, with the environment that is there: under a minute

JSON keys: first_picture_minutes, two_machines_minutes, own_run_minutes; the same with _commands; setup_minutes: of the
first picture's (null where it was not measured).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.namespaces import Host, Network, NoNetwork

from scripts.benchmarks.harness import ROOT

QUICK = "a run of one's own alone, with this clone's environment"
PORT = 31337
LONGEST = 1200  # seconds until something that is waited for must have been said
JOIN_LINE = re.compile(r"tt join (\S+) --peer (/ip4/\S+)")


class Newcomer:
    """Types commands, one after the other, at one machine; host: None for this one. folder: default: the clone."""

    def __init__(self, clone: Path, home: Path, host: Host | None = None, folder: Path | None = None):
        self.folder, self.host, self.commands = folder or clone, host, 0
        self._environment = {**os.environ, "TT_HOME": str(home), "PATH": f"{clone / '.venv/bin'}:{os.environ['PATH']}"}
        self._running: list[subprocess.Popen[str]] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def types(self, *command: str, until: Callable[[str], Any] | None = None) -> Any:
        """Start a command; until: a function of a line it says, whose first true answer is returned while it goes on.

        Without `until`, its end is awaited. Raises SystemExit where it fails.
        """
        self.commands += 1
        start = self.host.start if self.host else subprocess.Popen
        options: dict[str, Any] = {"cwd": self.folder, "env": self._environment, "text": True}
        process = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **options)
        self._running.append(process)
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, self._lines), daemon=True).start()
        return self.hears(until)

    def hears(self, until: Callable[[str], Any] | None = None) -> Any:
        """What the last command says from now on, as in `types`."""
        said: list[str] = []
        process, ends = self._running[-1], time.monotonic() + LONGEST
        try:
            while (line := self._lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
                said.append(line)
                if until is not None and (found := until(line)):
                    return found
            failed = until is not None or process.wait() != 0
        except queue.Empty:
            failed = True
        if failed:
            raise SystemExit(f"{' '.join(map(str, process.args))}:\n" + "".join(said[-20:]))
        return None

    def leaves(self) -> None:
        """End what still runs."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.terminate()  # as Ctrl-C, which who was started in the background does not hear
        for process in self._running:
            process.wait(timeout=60)


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """All that it says, to its end: a full pipe would stop it. None: nothing more comes."""
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def first_picture(clone: Path, folder: Path) -> dict[str, Any]:
    """From nothing to a picture: minutes of all, and of the set-up."""
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    newcomer = Newcomer(clone, folder / "home")
    demo = ("scripts/demo", "--plain", "--out", str(folder / "demo"), "--prompt", "a red apple")
    newcomer.types(*demo, until=lambda line: line.startswith("Done: "))
    set_up = time.monotonic() - began
    newcomer.hears()
    took = time.monotonic() - began
    if not list((folder / "demo").rglob("*.png")):
        raise SystemExit(f"no picture in {folder / 'demo'}")
    print(f"first picture: {took / 60:.1f} minutes, {set_up / 60:.1f} of them the set-up", file=sys.stderr)
    return {
        "setup_minutes": set_up / 60,
        "first_picture_minutes": took / 60,
        "first_picture_commands": 1 + newcomer.commands,
    }


def two_machines(clone: Path, folder: Path) -> dict[str, Any]:
    """From a set-up `tt` on both to the first step that both have made together."""
    with Network(hosts=2, mbit=100) as network:
        one, other = (Newcomer(clone, folder / host.address, host) for host in network.hosts)
        try:
            began = time.monotonic()
            address = f"/ip4/{network.hosts[0].address}/tcp/{PORT}"
            run, peer = one.types("tt", "aux-peer", "emoji", "--announce", address, until=line_to_join)
            join = ("tt", "join", run, "--peer", peer, "--json")
            one.types(*join, until=has_trained)
            other.types(*join, until=is_of_two)
            took = time.monotonic() - began
        finally:
            other.leaves()
            one.leaves()
    print(f"two machines: {took / 60:.1f} minutes", file=sys.stderr)
    return {"two_machines_minutes": took / 60, "two_machines_commands": one.commands + other.commands}


def own_run(clone: Path, folder: Path) -> dict[str, Any]:
    """From a set-up `tt` to the first step of a run that nobody had before."""
    newcomer = Newcomer(clone, folder / "own-home", folder=folder)
    try:
        began = time.monotonic()
        newcomer.types("tt", "init", "my-run", "--yes", "--size", "tiny", "--batch", "64")
        newcomer.types("tt", "check", "my-run/run.toml")
        listens = ("--announce", f"/ip4/127.0.0.1/tcp/{PORT}", "--no-publish")
        _, peer = newcomer.types("tt", "aux-peer", "my-run/run.toml", *listens, until=line_to_join)
        newcomer.types("tt", "join", "my-run/run.toml", "--peer", peer, "--json", until=has_stepped)
        took = time.monotonic() - began
    finally:
        newcomer.leaves()
    return {"own_run_minutes": took / 60, "own_run_commands": newcomer.commands}


def line_to_join(line: str) -> tuple[str, str] | None:
    """The run and the address in the line that an aux peer prints for everybody else."""
    found = JOIN_LINE.search(line)
    return (found[1], found[2]) if found else None


def has_trained(line: str) -> bool:
    """Whether an event of `tt join --json` says that examples were computed."""
    event = json.loads(line)
    return bool(event["kind"] == "progress" and event["my_samples"])


def has_stepped(line: str) -> bool:
    """… that a step was made."""
    return bool(json.loads(line)["kind"] == "step")


def is_of_two(line: str) -> bool:
    """… that a round of two or more was made."""
    event = json.loads(line)
    return bool(event["kind"] == "round" and event["outcome"] == "committed" and len(event["members"]) > 1)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All three paths."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tt-newcomer-") as scratch:
        folder = Path(scratch)
        clone = ROOT if args.quick else folder / "clone"
        if not args.quick:
            figures |= first_picture(clone, folder)
            try:
                figures |= two_machines(clone, folder)
            except NoNetwork as error:
                print(f"two machines: not measured, {error}", file=sys.stderr)
        figures |= own_run(clone, folder)
    paths = ("first_picture", "two_machines", "own_run")
    keys = ("setup_minutes", *(f"{path}_{unit}" for path in paths for unit in ("minutes", "commands")))
    return {key: figures.get(key) for key in keys}

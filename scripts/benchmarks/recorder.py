"""Kill a recorder (SIGKILL) again and again while it writes, and count what is lost of what it had committed.

A process of its own records steps of twenty peers, counts of trainers and snapshots as fast as the database takes them,
and tells each step when its transaction has been committed. It is killed at a random moment; then the file is checked
(SQLite's integrity_check), and every step that was told must be in it, with none missing before it. The next process
goes on where this one was.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tt_cli.auxiliary.recorder import Kind, RunRecorder, Write
from tt_cli.history.writer import FILE, HistoryWriter, database_url
from tt_cli.run import load_run
from tt_cli.supervisor.reporter import die_with_parent
from tt_cli.swarm.records.consensus import SwarmState
from tt_cli.swarm.records.peer_record import PeerRecord

QUICK = "5 kills instead of 50"
PEERS = 20
LONGEST_LIFE = 1.0  # seconds from the first commit to the kill
RUN = load_run("emoji")


def view(step: int) -> SwarmState:
    """The swarm at a step."""
    told = {
        "role": "trainer",
        "client_mode": False,
        "digest": "aa",
        "samples": 0,
        "samples_per_second": 5.0,
        "loss": 2.5,
    }
    totals = {"epoch": step, "total_samples": 25 * step, "time": time.time(), "round": f"step {step} made with others"}
    return SwarmState.of(PeerRecord.model_validate({"peer_id": f"peer{n}", **told, **totals}) for n in range(PEERS))


class TellingRecorder(RunRecorder):
    """A recorder that prints each step's number when its transaction has been committed. ahead: steps not yet told."""

    ahead = threading.Semaphore(3)

    def _write(self, kind: Kind, write: Write) -> None:
        step = self.step

        def written(store: HistoryWriter, seen: list[PeerRecord], steps: int) -> None:
            write(store, seen, steps)
            if kind == "step":
                os.write(1, f"{step}\n".encode())
                self.ahead.release()

        super()._write(kind, written)


def write(folder: Path) -> None:
    """Record for ever."""
    die_with_parent()
    recorder = TellingRecorder(RUN, database_url(folder), lambda line, level: print(line, file=sys.stderr))
    for step in itertools.count(recorder.step + 1):
        recorder.ahead.acquire()
        recorder.record(view(step))
        recorder.put("snapshot", {"step": step, "filling": "x" * 5000})


def killed(folder: Path, moment: float) -> int:
    """Run a writer, kill it so many seconds after its first commit. Returns the last step that it told."""
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(moment)
        process.kill()
        whole = (first + process.stdout.read()).rpartition("\n")[0].splitlines()
    return int(whole[-1]) if whole else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Kill so many times; what is lost after each."""
    draw, kills = random.Random(1), 5 if args.quick else 50
    figures = {"kills": kills, "steps": 0, "steps_lost": 0, "corrupt": 0, "peers": PEERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(kills):
            last = killed(folder, draw.uniform(0.0, LONGEST_LIFE))
            plain = sqlite3.connect(folder / FILE)
            figures["corrupt"] += plain.execute("pragma integrity_check").fetchone() != ("ok",)
            kept = {row[0] for row in plain.execute("select step from steps where undone = 0")}
            samples = plain.execute("select sum(samples) from peers").fetchone()[0] or 0
            plain.close()
            figures["steps_lost"] += len(set(range(1, last + 1)) - kept)
            figures["steps"] = len(kept)
            figures["samples_lost"] = max(0, 25 * PEERS * max(kept, default=0) - samples)
        figures["corrupt"] += len(list(folder.glob(f"{FILE}.damaged-*")))
    return figures | {"sqlite": sqlite3.sqlite_version}


if __name__ == "__main__":
    write(Path(sys.argv[1]))

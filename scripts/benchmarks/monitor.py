"""What a refresh of `tt monitor` costs: of made records of 10, 100 and 1,000 peers, and of a run of many steps.

snapshot: records → Snapshot (in a thread beside the screen). log: what changed since the one before. The screen's part,
200 x 60 cells: peers (every row's remarks, sorted; those seen written), leaderboard, overview with its charts. Median
CPU milliseconds; reading the records from the DHT and checking their signatures is not part of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

from scripts.benchmarks.harness import cpu_time
from tt_cli.monitor.changes import changes
from tt_cli.monitor.peer_tables import LEADER_COLUMNS, PEER_COLUMNS, leader_rows, peer_rows
from tt_cli.monitor.scene import EVER, Active, Scene, leaders_now
from tt_cli.monitor.views import overview
from tt_cli.run import load_run
from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord
from tt_cli.swarm.records.snapshot import SwarmSnapshot, take_snapshot
from tt_cli.terminal.table import row_line, widths

QUICK = "few repeats"
WIDTH, HEIGHT = 200, 60
NOW = 1_000_000.0


def made_records(count: int, step: int, chance: random.Random) -> list[PeerRecord]:
    """Of `count` peers, one in twenty of them auxiliary, some behind and some unlike the others."""
    usual = {"client_mode": False, "epoch": step, "digest": "3fa9c1d2", "time": NOW - 3, "vote": True}
    return [
        PeerRecord.model_validate(
            usual
            | {
                "peer_id": f"QmWjTgY4Hjbz8pQ4kYNcoV6sTEFz7tF2zZrbB1XQ{number:06d}",
                "role": "aux" if number % 20 == 19 else "trainer",
                "user": f"volunteer-{number % 700}",
                "device": chance.choice(["NVIDIA H200", "NVIDIA GeForce RTX 3090", "Tesla T4", "CPU, 8 threads"]),
                "epoch": step - (number % 50 == 7),
                "digest": "77b0aa00" if number % 90 == 11 else "3fa9c1d2",
                "samples": chance.randrange(100),
                "samples_per_second": chance.random() * 20,
                "total_samples": chance.randrange(10**7),
                "loss": 3 + chance.random(),
                "round": f"step {step} made with {count} others, 4102 samples",
            }
        )
        for number in range(count)
    ]


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The median CPU time of `work`."""
    return 1000 * statistics.median(cpu_time(work) for _ in range(repeats))


def measured(count: int, steps: int, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a refresh with `count` peers and a curve of `steps`."""
    run, chance = load_run("dalle"), random.Random(count)
    records, history = made_records(count, 1204, chance), HistoryRecord(steps=[])
    snapshot: SwarmSnapshot = take_snapshot(run, records, history, NOW)
    before = snapshot.model_copy(update={"epoch": 1203, "peers": snapshot.peers[:-1]})
    scene = Scene(
        run="dalle",
        identity=run.identity,
        now=NOW,
        asked_since=NOW - 60,
        empty=False,
        snapshot=snapshot,
        curve=[(step, 3 + 300 / (step + 50) + chance.random() / 3) for step in range(1, steps + 1)],
        activity=[Active(NOW - 30 * ago, count, 12.0 * count) for ago in range(1000, 0, -1)],
        leaders={EVER: leaders_now(snapshot)},
        flops_per_sample=10**12,
    )

    def peers() -> None:
        rows = sorted(peer_rows(snapshot), key=PEER_COLUMNS[3].by, reverse=True)
        cells = widths(PEER_COLUMNS, WIDTH)
        for row in rows[:HEIGHT]:
            row_line(PEER_COLUMNS, cells, row)

    def leaderboard() -> None:
        rows = leader_rows(leaders_now(snapshot), NOW)
        cells = widths(LEADER_COLUMNS, WIDTH)
        for row in rows[:HEIGHT]:
            row_line(LEADER_COLUMNS, cells, row)

    return {
        "snapshot_ms": milliseconds(lambda: take_snapshot(run, records, history, NOW), repeats),
        "log_ms": milliseconds(lambda: changes(before, snapshot), repeats),
        "peers_ms": milliseconds(peers, repeats),
        "leaderboard_ms": milliseconds(leaderboard, repeats),
        "overview_ms": milliseconds(lambda: overview(scene, WIDTH, HEIGHT, last=None, log=False), repeats),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--steps", type=int, default=2000, help="of the loss curve (default 2000, as a page gives)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """By the number of peers."""
    repeats = 3 if args.quick else 21
    return {"steps": args.steps, "peers": {count: measured(count, args.steps, repeats) for count in (10, 100, 1000)}}

"""Made snapshots for the monitor's tests, and a watch over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tt_cli.monitor.page_client import Page
from tt_cli.monitor.watch import SwarmWatch
from tt_cli.swarm.records.snapshot import PeerView, SwarmSnapshot

EVIL = "\x1b[2J\x9b1m\nowned"
TRAINER = PeerView(
    peer_id="12D3KooWQwEw2y9KSEWsKbqcYQDtxHSbBqvzhdT6Sr2ncf9A2r1C",
    user="anna",
    role="trainer",
    device="NVIDIA H200",
    version="0.1.0",
    client_mode=False,
    epoch=7,
    lag=0,
    samples_per_second=12.14,
    share=0.75,
    samples=60,
    total_samples=9000,
    loss=3.0,
    round="step 7 made with 2 others, 256 samples",
    digest="3fa9c1d2aa",
    in_agreement=True,
    resynced_chunks=0,
    clipped_by=0,
    accused_by=0,
    slow_by=0,
    age_s=4.0,
)


def trainer(**changes: object) -> PeerView:
    return PeerView(**{**vars(TRAINER), **changes})  # type: ignore[arg-type]


def snapshot(**changes: object) -> SwarmSnapshot:
    usual = {
        "run": "emoji",
        "identity": "emoji-1a2b3c4d",
        "time": 1_000_000.0,
        "epoch": 7,
        "total_steps": 2000,
        "target_batch_size": 256,
        "samples": 100,
        "samples_per_second": 16.2,
        "eta_s": 9.6,
        "loss": 3.214,
        "digest": "3fa9c1d2aa",
        "holders": 1,
        "agreeing": 1,
        "resynced_chunks": 0,
        "trainers": 1,
        "names_checked": True,
        "peers": [TRAINER],
        "history": [(step, 7.0 - step, 10.0 * step) for step in range(1, 7)],
    }
    return SwarmSnapshot(**{**usual, **changes})  # type: ignore[arg-type]


def crowd(count: int) -> list[PeerView]:
    return [
        trainer(peer_id=f"QmWjTgY4Hjbz8pQ4kYN{i:05d}", user=["陈" * 40, "anna", ""][i % 3], lag=i * 10**6)
        for i in range(count)
    ]


def watch_of(
    look: Callable[[], SwarmSnapshot], folder: Path, *, interval: float = 0.2, page: Page | None = None
) -> SwarmWatch:
    """A watch that looks with `look`, of a run whose folder is `folder`."""
    made = {"interval": interval, "source": "made", "page": page, "folder": folder, "flops": 4 * 10**11}
    return SwarmWatch("emoji", "emoji-1a2b3c4d", look, **made)  # type: ignore[arg-type]

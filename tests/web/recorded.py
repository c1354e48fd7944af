"""A short history of the built-in run, written as an auxiliary peer writes it."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from history.test_store import seen
from swarm.made import record

from tt_cli.history.writer import HistoryWriter, MadeStep, database_url
from tt_cli.memory.answer_tables import Tables
from tt_cli.run import load_run
from tt_cli.swarm.records.snapshot import take_snapshot

RUN = load_run("emoji")


class TablesMadeOnce(Tables):
    """A page's tables of few models, kept for the tests after the first that asks for them: each takes a second."""

    def __init__(self) -> None:
        super().__init__(RUN, "emoji")
        self.names = ("run", "gpt2-large", "bert-base")
        self._made = cache(super().table)

    def table(self, name: str) -> dict[str, Any]:
        return self._made(name)


TABLES = TablesMadeOnce()


def write_history(folder: Path, *, steps: int) -> None:
    """Have the folder's history.db go up to `steps`, with one trainer, a checkpoint, and one of its two pictures."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    store = HistoryWriter(database_url(folder), RUN.identity)
    began = time.time() - 20.0 * steps
    known = store.losses()
    for step in range(len(known) + 1, steps + 1):
        made = MadeStep(step, 0, began + 20.0 * step, 7.0 - step / steps, 1, 25.0, f"step {step} made by 1 peer")
        store.record_step(made, [seen("peer-a", 512 * step, "<b>ada</b>")], 512)
        store.record_activity(began + 20.0 * step, step, 1, 25.0, [], 512)
    given = {"client_mode": True, "samples": 3, "samples_per_second": 25.0, "total_samples": 512 * steps, "loss": 6.0}
    peer = record("peer-a", user="<b>ada</b>", device="cpu", epoch=steps, time=time.time(), **given)
    snapshot = take_snapshot(RUN, [peer], None, time.time()).to_json()
    del snapshot["history"]
    store.put("snapshot", json.dumps(snapshot), time.time())
    store.put("addresses", json.dumps(["/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZ"]), time.time())
    store.add_checkpoint(steps, time.time(), "d" * 64, 1_000_000)
    store.add_pictures(steps, [("red apple", f"{steps}-0.png"), ("sailboat", f"{steps}-1.png")])
    store.close()
    (folder / "pictures" / f"{steps}-0.png").write_bytes(b"picture")

"""The page's answers as plain data: served as JSON by `tt_cli.web.web_app`, and written into files by an export."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from tt_cli.errors import TTError
from tt_cli.history.reader import HistoryReader, Row
from tt_cli.memory.answer_tables import RUN, Tables
from tt_cli.run import DalleRun, RunConfig
from tt_cli.web.response_cache import ResponseCache
from tt_cli.web.run_facts import figures, run_facts
from tt_cli.web.step_columns import StepColumns

logger = logging.getLogger(__name__)

Content = dict[str, Any]
Window = Literal["day", "ever"]

ACTIVITY_SECONDS = 15.0  # between two looks at all of it: 0.2 s after a year
DAY_SECONDS = 86400.0
STALE_SECONDS = 60.0  # of a snapshot, after which nobody watches the swarm


class NothingYet(Exception):
    """No snapshot has been taken."""


class Answers:
    """Answers about one run. name: how people join it. clock: Unix seconds. Methods raise DatabaseDown; thread-safe.

    tables: the calculator's, where they are not those of this run's page.
    """

    def __init__(
        self,
        source: HistoryReader,
        run: RunConfig,
        name: str,
        clock: Callable[[], float] = time.time,
        tables: Tables | None = None,
    ):
        self.source, self._run, self._name, self._clock = source, run, name, clock
        self.tables = tables or Tables(run, name)
        self.history, self._rows = StepColumns(source), ResponseCache()

    def run(self) -> Content:
        """/api/run."""
        return run_facts(self._run, self._name, self._told("model", {}), self._told("addresses", []))

    def snapshot(self) -> Content:
        """/api/snapshot. Raises NothingYet."""
        newest = self.source.newest("snapshot")
        if newest is None:
            raise NothingYet
        content: Content = json.loads(newest[0])
        content["age_s"] = round(max(0.0, self._clock() - newest[1]), 1)
        return content

    def steps(self, points: int, first: int | None = None, last: int | None = None) -> Content:
        """/api/history."""
        self.history.look()
        return self.history.thinned(points, first, last)

    def activity(self, points: int, since: float = 0.0) -> Content:
        """/api/activity; of too many rows, means over equally many."""
        rows = self._rows.get("activity", ACTIVITY_SECONDS, lambda: np.reshape(self.source.activity(), (-1, 3)))
        rows = rows[np.searchsorted(rows[:, 0], since, side="right") :]
        starts = np.arange(0, len(rows), -(-len(rows) // points) or 1)
        means = np.add.reduceat(rows, starts) / np.diff(starts, append=len(rows))[:, None]
        return {
            "time": rows[starts, 0].round(1).tolist(),
            "trainers": means[:, 1].round(1).tolist(),
            "samples_per_second": means[:, 2].round(2).tolist(),
        }

    def leaderboard(self, window: Window) -> Content:
        """/api/leaderboard."""
        since = self._clock() - DAY_SECONDS if window == "day" else None
        return {"window": window, "rows": self.source.leaderboard(since)}

    def peers(self) -> Content:
        """/api/peers."""
        return {"rows": self.source.peers()}

    def checkpoints(self, pictures: Path) -> Content:
        """/api/checkpoints, with what is in the folder `pictures`: another aux peer may have drawn the rest."""
        rows, there = self.source.checkpoints(), {file.name for file in pictures.glob("*")}
        for row in rows:
            row["pictures"] = [picture for picture in row["pictures"] if picture["file"] in there]
            for picture in row["pictures"]:
                picture["url"] = f"pictures/{quote(picture.pop('file'))}"
        return {"rows": rows}

    def rounds(self) -> Content:
        """/api/rounds."""
        return {"rows": self.source.rounds()}

    def figures(self) -> Content:
        """/api/figures."""
        return figures(self._run, self._told("model", {}), self._told("snapshot", {}), self.source.totals())

    def calculator(self, model: str) -> Content:
        """/api/calculator; the coordinator's where torch makes it. Raises NothingYet; UsageError for another name."""
        if model != RUN or isinstance(self._run, DalleRun):
            return self.tables.table(model)
        if not (told := self._told("calculator", {})):
            raise NothingYet
        return {**told, "command": f"tt calc {shlex.quote(self._name)}"}

    def health(self) -> Content:
        """/health: {"status": "ok" or "bad", "problems": in words, "snapshot_age_s", "parts"}. Raises nothing."""
        problems, parts = list[str](), list[Row]()
        age, now = None, self._clock()
        try:
            self.source.try_writing()
            for row in self.source.parts():
                age_s = round(max(0.0, now - row["time"]), 1)
                parts.append({"name": row["name"], "words": row["words"], "age_s": age_s})
            newest = self.source.newest("snapshot")
            age = None if newest is None else round(now - newest[1], 1)
            if age is None or age > STALE_SECONDS:
                old = "none yet" if age is None else f"the last one {age:.0f} s ago"
                problems.append(f"the coordinator takes no snapshots: {old}")
        except TTError as error:
            logger.warning("%s", error)  # not for everybody's eyes: it names hosts
            problems.append("the run's history cannot be read and written")
        status = "bad" if problems else "ok"
        return {"status": status, "problems": problems, "snapshot_age_s": age, "parts": parts}

    def _told(self, key: str, otherwise: Any) -> Any:
        newest = self.source.newest(key)
        return otherwise if newest is None else json.loads(newest[0])

"""Reader of what the recorder wrote: for the web page, the screens and whoever exports a run. Changes nothing."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, case, func, select, update

from tt_cli.database import Database
from tt_cli.history.schema import (
    about,
    activity,
    checkpoints,
    hours,
    now,
    peers,
    pictures,
    rounds,
    steps,
)
from tt_cli.history.writer import WHOSE

Row = dict[str, Any]

MOST_ROWS = 1000  # of peers and of the leaderboard


class HistoryReader:
    """The history of one run by its database's URL (see store.database_url). Methods raise DatabaseDown."""

    def __init__(self, url: str):
        # Not pooled: a damaged SQLite file is replaced by another of the same name.
        self._database = Database(url, WHOSE, pooled=False)

    def close(self) -> None:
        """Close its connections."""
        self._database.close()

    def newest(self, key: str) -> tuple[str, float] | None:
        """The newest "snapshot" (JSON), "model" (JSON) or other value of `Store.put`, and its Unix time."""
        with self._database.reading() as connection:
            row = connection.execute(select(now.c.value, now.c.time).where(now.c.key == key)).first()
        return None if row is None else (row.value, row.time)

    def parts(self) -> list[Row]:
        """The parts' last words about themselves: {"name", "words", "time"}."""
        query = select(now).where(now.c.key.startswith("part ", autoescape=True)).order_by(now.c.key)
        return [
            {"name": row["key"].removeprefix("part "), "words": row["value"], "time": row["time"]}
            for row in self._rows(query)
        ]

    def era(self) -> str:
        """Changes whenever recorded steps stop being part of the run."""
        with self._database.reading() as connection:
            mark = connection.execute(select(about.c.value).where(about.c.key == "went back")).scalar()
        return mark or ""

    def taken_back(self) -> tuple[int, int] | None:
        """The organiser's newest order to go back that took back recorded steps: (its number, the first of them)."""
        query = select(steps.c.undone, func.min(steps.c.step)).where(steps.c.undone > 0).group_by(steps.c.undone)
        with self._database.reading() as connection:
            row = connection.execute(query.order_by(steps.c.undone.desc()).limit(1)).first()
        return None if row is None else (row[0], row[1])

    def steps_after(self, step: int, most: int = 100_000) -> list[tuple[int, float, float, int, float]]:
        """(step, Unix time, loss, trainers, samples per second) of the steps after this one, oldest first."""
        columns = (steps.c.step, steps.c.time, steps.c.loss, steps.c.trainers, steps.c.samples_per_second)
        part = (steps.c.undone == 0, steps.c.step > step)
        with self._database.reading() as connection:
            rows = connection.execute(select(*columns).where(*part).order_by(steps.c.step).limit(most))
            return [(row.step, row.time, row.loss, row.trainers, row.samples_per_second) for row in rows]

    def activity(self, since: float) -> list[tuple[float, int, float]]:
        """(Unix time, trainers, samples per second) after this time, oldest first."""
        with self._database.reading() as connection:
            query = select(activity).where(activity.c.time > since).order_by(activity.c.time)
            return [(row.time, row.trainers, row.samples_per_second) for row in connection.execute(query)]

    def leaderboard(self, since: float | None = None) -> list[Row]:
        """{"user", "samples", "seconds", "peers", "share", "last_seen"}, most samples first.

        since: Unix time, to the hour and at most two days back; None: ever. A peer without a user is listed by its id.
        """
        name = case((peers.c.user == "", peers.c.peer_id), else_=peers.c.user)
        given, source = peers, select(peers)
        if since is not None:
            pair = (hours.c.peer_id == peers.c.peer_id) & (hours.c.user == peers.c.user)
            source = source.join(hours, pair).where(hours.c.hour > int(since // 3600))
            given = hours
        samples, seconds = func.sum(given.c.samples), func.sum(given.c.seconds)
        query = source.with_only_columns(
            name.label("user"),
            samples.label("samples"),
            seconds.label("seconds"),
            func.count(peers.c.peer_id.distinct()).label("peers"),
            func.max(peers.c.last_seen).label("last_seen"),
        ).group_by(name)
        rows = self._rows(query.having(samples + seconds > 0).order_by(samples.desc(), name).limit(MOST_ROWS))
        with self._database.reading() as connection:
            whole = int(connection.execute(source.with_only_columns(func.sum(given.c.samples))).scalar() or 0)
        for row in rows:
            row["samples"] = int(row["samples"])  # PostgreSQL sums to decimals
            row["seconds"] = round(row["seconds"], 1)
            row["share"] = row["samples"] / whole if whole else 0.0
        return rows

    def peers(self) -> list[Row]:
        """Peers that have been seen, the latest first."""
        columns = (peers.c.peer_id, peers.c.user, peers.c.role, peers.c.device, peers.c.first_seen, peers.c.last_seen)
        query = select(*columns, peers.c.samples, peers.c.seconds).where(peers.c.peer_id != "")
        return self._rows(query.order_by(peers.c.last_seen.desc(), peers.c.peer_id).limit(MOST_ROWS))

    def totals(self) -> Row:
        """{"peers", "users", "devices", "samples", "seconds"} of all time."""
        with self._database.reading() as connection:
            query = select(
                func.count(peers.c.peer_id.distinct()).label("peers"),
                func.count(func.nullif(peers.c.user, "").distinct()).label("users"),
                func.count(func.nullif(peers.c.device, "").distinct()).label("devices"),
                func.coalesce(func.sum(peers.c.samples), 0).label("samples"),
                func.coalesce(func.sum(peers.c.seconds), 0.0).label("seconds"),
            ).where(peers.c.role == "trainer")
            row = dict(connection.execute(query).one()._mapping)
        return {**row, "samples": int(row["samples"])}

    def rounds(self, most: int = 200) -> list[Row]:
        """{"step", "time", "words"} of the newest averaging rounds, oldest first."""
        query = select(rounds.c.step, rounds.c.time, rounds.c.words).order_by(rounds.c.id.desc()).limit(most)
        return self._rows(query)[::-1]

    def checkpoints(self) -> list[Row]:
        """The columns of `checkpoints`, and "pictures": [{"prompt", "file"}]; newest last."""
        drawn: dict[int, list[Row]] = {}
        for row in self._rows(select(pictures).order_by(pictures.c.step, pictures.c.prompt)):
            drawn.setdefault(row["step"], []).append({"prompt": row["prompt"], "file": row["file"]})
        rows = self._rows(select(checkpoints).order_by(checkpoints.c.step))
        return [{**row, "pictures": drawn.get(row["step"], [])} for row in rows]

    def try_writing(self) -> None:
        """Write what is there once more, to see whether it can be done."""
        with self._database.transaction() as connection:
            connection.execute(update(about).where(about.c.key == "schema").values(value=about.c.value))

    def _rows(self, query: Select[Any]) -> list[Row]:
        with self._database.reading() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

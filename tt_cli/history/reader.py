"""Reader of what the recorder wrote: for the web page, the screens and whoever exports a run. Changes nothing."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, case, func, select, update

from tt_cli.database import Database
from tt_cli.history.schema import about, activity, checkpoints, hours, now, peers, pictures, rounds, steps
from tt_cli.history.writer import WHOSE

Row = dict[str, Any]

MOST_ROWS = 1000  # of peers and of the leaderboard
NEWEST_ROUNDS = 200


class HistoryReader:
    """The history of one run by its database's URL; file: of SQLite, else None. Methods raise DatabaseDown."""

    def __init__(self, url: str):
        # Not pooled: a damaged SQLite file is replaced by another of the same name.
        self._database = Database(url, WHOSE, pooled=False)
        self.close, self.file = self._database.close, self._database.file

    def newest(self, key: str) -> tuple[str, float] | None:
        """The newest "snapshot" (JSON), "model" (JSON) or other value of `Store.put`, and its Unix time."""
        rows = self._tuples(select(now.c.value, now.c.time).where(now.c.key == key))
        return rows[0] if rows else None

    def parts(self) -> list[Row]:
        """What the parts last said of themselves: {"name", "words", "time"}."""
        name = func.substr(now.c.key, len("part ") + 1).label("name")
        query = select(name, now.c.value.label("words"), now.c.time)
        return self._rows(query.where(now.c.key.startswith("part ", autoescape=True)).order_by(now.c.key))

    def era(self) -> str:
        """Changes whenever recorded steps stop being part of the run."""
        rows = self._tuples(select(about.c.value).where(about.c.key == "went back"))
        return rows[0][0] if rows else ""

    def taken_back(self, after: int) -> tuple[int, int] | None:
        """Of the organiser's orders after this one: (the newest, the first recorded step that any took back)."""
        query = select(func.max(steps.c.undone), func.min(steps.c.step)).where(steps.c.undone > after)
        ((order, first),) = self._tuples(query)
        return None if order is None else (order, first)

    def steps_after(self, step: int, most: int = 100_000) -> list[tuple[int, float, float, int, float]]:
        """(step, Unix time, loss, trainers, samples per second) of the steps after this one, oldest first."""
        columns = (steps.c.step, steps.c.time, steps.c.loss, steps.c.trainers, steps.c.samples_per_second)
        after = (steps.c.undone == 0, steps.c.step > step)
        return self._tuples(select(*columns).where(*after).order_by(steps.c.step).limit(most))

    def activity(self) -> list[tuple[float, int, float]]:
        """(Unix time, trainers, samples per second), oldest first."""
        return self._tuples(select(activity).order_by(activity.c.time))

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
        whole = int(self._tuples(source.with_only_columns(func.sum(given.c.samples)))[0][0] or 0)
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
        """{"peers", "devices", "samples", "seconds"} of all time."""
        query = select(
            func.count(peers.c.peer_id.distinct()).label("peers"),
            func.count(func.nullif(peers.c.device, "").distinct()).label("devices"),
            func.coalesce(func.sum(peers.c.samples), 0).label("samples"),
            func.coalesce(func.sum(peers.c.seconds), 0.0).label("seconds"),
        )
        (row,) = self._rows(query.where(peers.c.role == "trainer"))
        return {**row, "samples": int(row["samples"])}

    def rounds(self) -> list[Row]:
        """{"step", "time", "words"} of the newest averaging rounds, oldest first."""
        query = select(rounds.c.step, rounds.c.time, rounds.c.words).order_by(rounds.c.id.desc()).limit(NEWEST_ROUNDS)
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

    def _tuples(self, query: Select[Any]) -> list[Any]:
        with self._database.reading() as connection:
            return list(map(tuple, connection.execute(query)))

    def _rows(self, query: Select[Any]) -> list[Row]:
        with self._database.reading() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

"""Writer of what an auxiliary peer sees of its run. Every method is one transaction, and may be repeated.

Notable:
- who gave what is counted from the growth of `total_samples` in the peers' records, against what the database last
  heard: nothing is lost or counted twice when a recorder is killed, or when two of them share a database;
- no peer is credited with more than a step can hold, whatever its record says;
- what grows with steps times peers is kept for the newest steps only; its sums stay for ever (see `tidy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Connection, Table, and_, cast, delete, func, inspect, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from tt_cli.database import Database, DatabaseDamaged, DatabaseDown
from tt_cli.errors import TTError, UsageError, os_errors
from tt_cli.history import schema
from tt_cli.history.schema import (
    about,
    activity,
    checkpoints,
    contributions,
    hours,
    now,
    peers,
    pictures,
    rounds,
    steps,
)
from tt_cli.swarm.records.peer_record import PeerRecord

FILE = "history.db"
DATABASE = "TT_DATABASE"  # in the environment: its URL, which may hold a password
PICTURES = "pictures"  # the folder of the pictures that were drawn from checkpoints
WHOSE = "the database of the run's history"

KEPT_STEPS = 5000  # whose contributions are kept one by one
KEPT_HOURS = 48
KEPT_ROUNDS = 1000
FULL_ACTIVITY_SECONDS = 14 * 86400.0  # after which one of COARSE_SECONDS is kept
COARSE_SECONDS = 600
MOST_PEERS = 50_000
GAP_SECONDS = 600.0  # between two signs of progress of a peer that has been computing all along
DOUBTED = -1  # in `undone`: of steps beyond those that the voters show
STEPS_OF_SAMPLES = 2  # steps' worth of samples that one peer may be credited with for one step


class OtherDatabase(UsageError):
    """Somebody else's: another run's, or of a newer version of this program."""


@dataclass(frozen=True)
class MadeStep:
    """A global step as it was seen. words: of its averaging round, "" where nobody told."""

    step: int
    era: int
    time: float
    loss: float
    trainers: int
    samples_per_second: float
    words: str = ""


def database_url(folder: Path, named: str = "") -> str:
    """SQLAlchemy's URL: the one that was named, else of the SQLite file in a run's folder."""
    return named or f"sqlite:///{folder / FILE}"


class HistoryWriter:
    """The database of one run (its identity). tell: takes a line for a person.

    Raises OtherDatabase for what is not this run's, DatabaseDown for no answer. A damaged SQLite file is set aside,
    and what can still be read of it is taken over. mends: False in all processes but the coordinator's; what is damaged
    is no answer there, and connections are not kept, so that a file that was replaced is not written to any more.
    """

    def __init__(self, url: str, run: str, tell: Callable[[str], None] = lambda words: None, *, mends: bool = True):
        self._run, self._tell = run, tell
        self._database = Database(url, WHOSE, pooled=mends)
        self.close = self._database.close
        self._insert: Any = (sqlite if self._database.engine.dialect.name == "sqlite" else postgresql).insert
        try:
            if mends:
                try:
                    self._check()
                except DatabaseDamaged:
                    self.begin_anew()
            self._found()
        except TTError:
            self.close()
            raise

    # ---------------------------------------------------------------- its beginning, and its end

    def _check(self) -> None:
        file = self._database.file
        if file is not None and file.exists():
            with self._database.reading() as connection:
                verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if verdict != "ok":
                raise DatabaseDamaged(f"{WHOSE} is damaged ({verdict})")

    def _found(self) -> None:
        with self._database.reading() as connection:
            there = inspect(connection).has_table(about.name)
            known = {row.key: row.value for row in connection.execute(select(about))} if there else {}
        if known:
            if not known.get("schema", "").isdecimal() or int(known["schema"]) > schema.SCHEMA:
                remedy = "install that one, or name another with --database"
                raise OtherDatabase(f"{WHOSE} is of a newer version of tt: {remedy}")
            if known.get("run") != self._run:
                raise OtherDatabase(f"{WHOSE} is of another run, {known.get('run')}: name another with --database")
            return
        try:
            with self._database.transaction() as connection:
                schema.metadata.create_all(connection)
                marks = [{"key": "schema", "value": str(schema.SCHEMA)}, {"key": "run", "value": self._run}]
                connection.execute(self._insert(about).on_conflict_do_nothing(), marks)
        except IntegrityError:  # another process makes the same tables at this moment
            self._found()
        self._database.protect()

    def begin_anew(self) -> None:
        """Set a damaged SQLite file aside; take over what can be read of it."""
        file = self._database.file
        assert file is not None, "only a SQLite file is found damaged"
        self._database.close()
        aside = file.with_name(f"{file.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        with os_errors(f"{WHOSE} is damaged and cannot be set aside", kind=DatabaseDown):
            for old in sorted(file.parent.glob(f"{file.name}.damaged-*"))[:-3]:  # each has up to three files
                old.unlink(missing_ok=True)
            for suffix in ("", "-wal", "-shm"):
                if (part := Path(f"{file}{suffix}")).exists():
                    part.rename(f"{aside}{suffix}")
        self._found()
        for table, rows in readable(aside):
            for first in range(0, len(rows), 500):
                # by damage, a row may be impossible
                with suppress(TTError, IntegrityError), self._database.transaction() as connection:
                    connection.execute(self._insert(table).on_conflict_do_nothing(), rows[first : first + 500])
        self._tell(f"{file.name} was damaged: it is {aside.name} now; what could be read of it stays")

    # ---------------------------------------------------------------- steps, and who made them

    def losses(self) -> list[tuple[int, float, float]]:
        """(step, loss, Unix time) of every step that is part of the run, oldest first."""
        with self._database.reading() as connection:
            query = select(steps.c.step, steps.c.loss, steps.c.time).where(steps.c.undone == 0).order_by(steps.c.step)
            return [(row.step, row.loss, row.time) for row in connection.execute(query)]

    def record_step(self, made: MadeStep, seen: Sequence[PeerRecord], target: int) -> None:
        """A step that was made, and what its peers gave since they were last seen. target: samples of a step.

        A step that the database has already, also from another recorder, stays as it is. What was doubted of steps
        before it is part of the run again, in the same era.
        """
        with self._database.transaction() as connection:
            earlier = select(func.max(steps.c.step)).where(steps.c.undone == 0, steps.c.step < made.step)
            if newest := connection.execute(earlier).scalar_one():
                target *= made.step - newest
            self._credit(connection, made.step, seen, made.time, STEPS_OF_SAMPLES * target)
            of_step = and_(contributions.c.undone == 0, contributions.c.step == made.step)
            given = connection.execute(select(func.sum(contributions.c.samples)).where(of_step)).scalar_one()
            row = {**asdict(made), "undone": 0, "samples": int(given or 0)}
            del row["words"]
            inserted = self._insert(steps).values(**row).on_conflict_do_nothing().returning(steps.c.step)
            if connection.execute(inserted).first() is not None and made.words:
                words = sane(made.words, 200)
                connection.execute(self._insert(rounds).values(step=made.step, time=made.time, words=words))
            between = and_(steps.c.undone == DOUBTED, steps.c.step > (newest or 0), steps.c.step < made.step)
            again = update(steps).where(between, steps.c.era == made.era).values(undone=0)
            if connection.execute(again).rowcount:
                self._put(connection, about, key="went back", value=str(time.time()))

    def record_activity(
        self, at: float, step: int, trainers: int, samples_per_second: float, seen: Sequence[PeerRecord], target: int
    ) -> None:
        """Record how many train now, towards which step, and what its peers gave since they were last seen."""
        with self._database.transaction() as connection:
            row = {"time": at, "trainers": trainers, "samples_per_second": samples_per_second}
            connection.execute(self._insert(activity).values(**row).on_conflict_do_nothing())
            self._credit(connection, step, seen, at, STEPS_OF_SAMPLES * target)

    def go_back(self, step: int, order: int) -> None:
        """An organiser's order: what was made after this step, in an earlier era, is no part of the run any more.

        It stays in the database, and what its peers gave stays theirs.
        """
        with self._database.transaction() as connection:
            after = and_(steps.c.undone == 0, steps.c.step > step, steps.c.era < order)
            gone = connection.execute(select(func.max(steps.c.step)).where(after)).scalar_one()
            # rows of another recorder, which went back before this one wrote the same steps
            before = and_(steps.c.undone == order, steps.c.step.in_(select(steps.c.step).where(after)))
            connection.execute(delete(steps).where(before))
            connection.execute(update(steps).where(after).values(undone=order))
            if gone is not None:
                given = and_(contributions.c.undone == 0, contributions.c.step > step, contributions.c.step <= gone)
                connection.execute(delete(contributions).where(given))
                connection.execute(delete(checkpoints).where(checkpoints.c.step > step))
                connection.execute(delete(pictures).where(pictures.c.step > step))
                self._put(connection, about, key="went back", value=str(time.time()))

    def doubt(self, step: int) -> None:
        """Take what was recorded of later steps out of the run until a still later one is recorded."""
        with self._database.transaction() as connection:
            after = and_(steps.c.undone == 0, steps.c.step > step)
            before = and_(steps.c.undone == DOUBTED, steps.c.step.in_(select(steps.c.step).where(after)))
            connection.execute(delete(steps).where(before))
            connection.execute(update(steps).where(after).values(undone=DOUBTED))
            self._put(connection, about, key="went back", value=str(time.time()))

    def _credit(self, connection: Connection, step: int, seen: Sequence[PeerRecord], at: float, most: int) -> None:
        """Add what each peer's total grew by; `most` is the most that one may have for this step."""
        if not seen:
            return
        # In one order and there before they are locked: two recorders wait for each other, and see the same.
        records = {(sane(record.peer_id, 128), sane(record.user, 80)): record for record in seen}
        keys = sorted(records)
        new = {"samples": 0, "seconds": 0.0, "told": 0, "progressed": at, "first_seen": at, "last_seen": at}
        rows = [{**new, "peer_id": peer_id, "user": user, "role": "", "device": ""} for peer_id, user in keys]
        connection.execute(self._insert(peers).on_conflict_do_nothing(), rows)
        known = {}
        for first in range(0, len(keys), 400):
            among = tuple_(peers.c.peer_id, peers.c.user).in_(keys[first : first + 400])
            for row in connection.execute(select(peers).where(among).order_by(*peers.primary_key).with_for_update()):
                known[row.peer_id, row.user] = row
        of_step = and_(contributions.c.undone == 0, contributions.c.step == step)
        columns = (contributions.c.peer_id, contributions.c.user, contributions.c.samples)
        credited = {(row.peer_id, row.user): row.samples for row in connection.execute(select(*columns).where(of_step))}
        written, given = [], []
        for key in keys:
            record = records[key]
            before, trains, total = known[key], record.role == "trainer", record.total_samples
            growth = total - (before.told if total >= before.told else 0)  # it shrinks where a peer began anew
            since = at - before.progressed
            gift: dict[str, Any] = {
                "peer_id": key[0],
                "user": key[1],
                "samples": max(0, min(growth, most - credited.get(key, 0))) if trains else 0,
                "seconds": since if trains and growth > 0 and 0.0 < since <= GAP_SECONDS else 0.0,
            }
            if gift["samples"] or gift["seconds"]:
                given.append(gift)
            progress = {"told": total, "progressed": at if growth > 0 else before.progressed}
            described = {"role": record.role, "device": sane(record.device, 80), "first_seen": at, "last_seen": at}
            written.append({**gift, **described, **progress})
        self._add(connection, peers, written, replaced=("role", "device", "last_seen", "told", "progressed"))
        self._add(connection, contributions, [{**row, "undone": 0, "step": step} for row in given])
        self._add(connection, hours, [{**row, "hour": int(at // 3600)} for row in given])

    def _add(
        self, connection: Connection, table: Table, rows: list[dict[str, Any]], replaced: Sequence[str] = ()
    ) -> None:
        """Insert, or add samples and seconds to the row there, whose `replaced` columns take the new values."""
        if not rows:
            return
        insert = self._insert(table)
        changes = {name: table.c[name] + insert.excluded[name] for name in ("samples", "seconds")}
        changes |= {name: insert.excluded[name] for name in replaced}
        connection.execute(insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes), rows)

    # ---------------------------------------------------------------- the newest of each kind

    def put(self, key: str, value: str, at: float) -> None:
        """The newest of something that changes: "snapshot" and "model" are JSON."""
        with self._database.transaction() as connection:
            self._put(connection, now, key=key, value=value, time=at)

    def tell_part(self, name: str, words: str) -> None:
        """A sign of life of a part of the auxiliary peer, and what it does, for /health."""
        self.put(f"part {sane(name, 40)}", sane(words, 300), time.time())

    def add_checkpoint(
        self, step: int, at: float, digest: str, size: int, url: str | None = None, heldout_loss: float | None = None
    ) -> None:
        """A checkpoint of `size` bytes; told again, what is None then keeps the value from before."""
        row = {"step": step, "time": at, "digest": sane(digest, 64), "bytes": size}
        row |= {name: value for name, value in (("url", url), ("heldout_loss", heldout_loss)) if value is not None}
        with self._database.transaction() as connection:
            self._put(connection, checkpoints, **row)

    def add_pictures(self, step: int, drawn: Iterable[tuple[str, str]]) -> None:
        """(prompt, file name in the run folder's `pictures`) of what was drawn from a checkpoint."""
        with self._database.transaction() as connection:
            for prompt, file in drawn:
                self._put(connection, pictures, step=step, prompt=sane(prompt, 300), file=Path(file).name[:200])

    def drop_pictures(self, of: Iterable[int]) -> None:
        """Forget what was drawn at these steps; whoever drew it removes the files."""
        with self._database.transaction() as connection:
            connection.execute(delete(pictures).where(pictures.c.step.in_(list(of))))

    def _put(self, connection: Connection, table: Table, **row: Any) -> None:
        """Insert a row, or give the row of its key these values."""
        keys = list(table.primary_key)
        changes = {name: value for name, value in row.items() if not table.c[name].primary_key}
        connection.execute(self._insert(table).values(**row).on_conflict_do_update(index_elements=keys, set_=changes))

    # ---------------------------------------------------------------- bounds

    def tidy(self, at: float) -> None:
        """Drop what is kept for a time only: see the constants above. The sums by peer stay."""
        with self._database.transaction() as connection:
            newest = int(connection.execute(select(func.max(contributions.c.step))).scalar_one() or 0)
            connection.execute(delete(contributions).where(contributions.c.step <= newest - KEPT_STEPS))
            connection.execute(delete(hours).where(hours.c.hour < int(at // 3600) - KEPT_HOURS))
            last = int(connection.execute(select(func.max(rounds.c.id))).scalar_one() or 0)
            connection.execute(delete(rounds).where(rounds.c.id <= last - KEPT_ROUNDS))
            old = activity.c.time < at - FULL_ACTIVITY_SECONDS
            slot = cast(activity.c.time / COARSE_SECONDS, BigInteger)
            kept = select(func.min(activity.c.time)).where(old).group_by(slot)
            connection.execute(delete(activity).where(old, activity.c.time.not_in(kept)))
            self._fold_peers(connection, at)

    def _fold_peers(self, connection: Connection, at: float) -> None:
        """Make one nameless row of those peers, of too many, that are away for a day and gave least."""
        excess = connection.execute(select(func.count()).select_from(peers)).scalar_one() - MOST_PEERS
        if excess <= 0:
            return
        away = and_(peers.c.last_seen < at - 86400.0, peers.c.peer_id != "")
        query = select(peers).where(away).order_by(peers.c.samples, peers.c.last_seen).limit(excess)
        folded = connection.execute(query).all()
        if not folded:
            return
        sums = {name: sum(getattr(row, name) for row in folded) for name in ("samples", "seconds")}
        seen = {"first_seen": min(row.first_seen for row in folded), "last_seen": max(row.last_seen for row in folded)}
        row = {"peer_id": "", "user": "", "role": "trainer", "device": "", "told": 0, "progressed": 0.0, **sums, **seen}
        self._add(connection, peers, [row], replaced=("last_seen",))
        for peer in folded:
            connection.execute(delete(peers).where(peers.c.peer_id == peer.peer_id, peers.c.user == peer.user))


def readable(file: Path) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
    """Rows that can be read of a damaged SQLite file, each table from both ends up to where its damage begins."""
    database = Database(f"sqlite:///{file}", WHOSE, pooled=False)
    for table in schema.metadata.sorted_tables:
        rows: list[dict[str, Any]] = []
        for direction in ("rowid", "rowid desc"):
            try:
                with database.reading() as connection:
                    ordered = select(table).order_by(text(direction))
                    for row in connection.execution_options(yield_per=100).execute(ordered).mappings():
                        rows.append(dict(row))
                break  # all of it
            except (TTError, ValueError, TypeError):  # what is left of it may have other types than the columns
                continue
        if table is about:
            rows = [row for row in rows if row["key"] not in ("schema", "run")]
        yield table, rows


def sane(text: str, most: int) -> str:
    """One line of at most so many characters, without control and other invisible ones (U+0000 above all)."""
    return "".join(character for character in text if character.isprintable())[:most]

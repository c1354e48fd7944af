"""A database by its URL, SQLite or PostgreSQL, through SQLAlchemy Core: transactions that are whole or not at all.

A committed transaction survives a kill at any instant (SQLite in WAL mode with synchronous=FULL; PostgreSQL as it is
set up). A SQLite file is readable by its owner alone. Several processes may share a database.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Engine, MetaData, NullPool, Table, create_engine, event
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from tt_cli.errors import TTError, UsageError

# A server that is gone without a word is noticed within half a minute, also amid a query.
CONNECTION = {"connect_timeout": 10, "tcp_user_timeout": 30_000}  # milliseconds, of what is not acknowledged
CONNECTION |= {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3}
_FORM = "--database: must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/NAME"
_DAMAGED = (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB


def make_table(metadata: MetaData, name: str, keys: dict[str, Any], *others: Column[Any], **columns: Any) -> Table:
    """A table by columns of name → type: the primary key, those that are never null; others as they are declared."""
    key = [Column(column, kind, primary_key=True, autoincrement=False) for column, kind in keys.items()]
    required = [Column(column, kind, nullable=False) for column, kind in columns.items()]
    return Table(name, metadata, *key, *required, *others)


class DatabaseDown(TTError):
    """The database does not answer."""


class DatabaseDamaged(DatabaseDown):
    """The SQLite file is none any more, or contradicts itself."""


class Database:
    """whose: begins the errors, such as "the authority's database". pooled: keep connections open between uses.

    Raises UsageError for a URL that is none.
    """

    def __init__(self, url: str, whose: str, *, pooled: bool = True):
        self.whose = whose
        options: dict[str, Any] = {} if pooled else {"poolclass": NullPool}
        if not re.match(r"(sqlite|postgres(ql)?)(\+\w+)?://", url):
            raise UsageError(_FORM)
        try:
            # A PostgreSQL URL means psycopg 3, whichever driver SQLAlchemy would take.
            scheme, separator, rest = url.partition("://")
            if scheme in ("postgres", "postgresql"):
                url = f"postgresql+psycopg{separator}{rest}"
                options["connect_args"] = CONNECTION
            self.engine: Engine = create_engine(url, pool_pre_ping=pooled, **options)
        except (ArgumentError, NoSuchModuleError, ValueError):  # ValueError: a port that is none
            raise UsageError(_FORM) from None
        except ImportError as error:
            raise UsageError(f"--database: {error.name} is missing: pip install 'tt-cli[postgres]'") from None
        if self.engine.dialect.name == "sqlite":
            _prepare_sqlite(self.engine)

    @property
    def file(self) -> Path | None:
        """Of SQLite; None for a database in memory and for a server's."""
        name = self.engine.url.database
        return Path(name) if self.engine.dialect.name == "sqlite" and name and name != ":memory:" else None

    def close(self) -> None:
        """Close its connections."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """To write; begins as a writer. Raises DatabaseDown, and IntegrityError as it is."""
        with self._told(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """To read one state of the database, while others write. Raises DatabaseDown."""
        with self._told(), self.engine.connect().execution_options(reading=True) as connection, connection.begin():
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            damaged = (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF in _DAMAGED
            kind = DatabaseDamaged if damaged else DatabaseDown
            raise kind(f"{self.whose} does not answer ({str(cause).splitlines()[0]})") from error

    def protect(self) -> None:
        """Only its owner may read a SQLite file."""
        if self.file is not None:
            for suffix in ("", "-wal", "-shm"):
                if (path := Path(f"{self.file}{suffix}")).exists():
                    path.chmod(0o600)


def _prepare_sqlite(engine: Engine) -> None:
    """Transactions that begin as writers: two processes wait for each other instead of failing half-way."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's own BEGIN counts, see `begun`
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

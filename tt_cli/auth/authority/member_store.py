"""The authority's memory: members, bans, orders, used nonces, and an audit trail that holds no token.

SQLAlchemy Core over SQLite or PostgreSQL. Every method is one transaction; several processes may share a database.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tt_cli.database import Database, make_table
from tt_cli.identity.passes import Notice, RollBack

MOST_AUDITED = 100_000  # entries; the oldest go first, but for these, which no stranger can have written
SPARED = ("joined", "ban", "unban", "pause", "resume", "rollback", "rotate", "proved", "restored")
_PRUNE_EVERY = 500  # entries

metadata = sa.MetaData()
_table = partial(make_table, metadata)
TIME, NAME, WORDS = sa.Float, sa.String(128), sa.String(500)
members = _table("members", {"peer_id": NAME}, user=NAME, way=sa.String(16), joined=TIME, proven=TIME, expires=TIME)
bans = _table("bans", {"kind": sa.String(8), "name": NAME}, at=TIME, reason=WORDS)  # kind: "user" or "peer"
orders = _table(
    "orders",
    {"id": sa.Integer},  # 1: the only row
    sa.Column("step", sa.BigInteger),
    sa.Column("digest", sa.String(256)),
    sa.Column("source", WORDS),
    number=sa.BigInteger,
    changed=TIME,
    paused=WORDS,
    order=sa.BigInteger,
)
used = _table("used", {"nonce": NAME}, expires=TIME)
audit = _table(
    "audit",
    {},
    sa.Column("id", sa.Integer, primary_key=True),
    at=TIME,
    who=NAME,
    what=sa.String(32),
    peer_id=NAME,
    detail=WORDS,
)
sa.Index("ix_members_user", members.c.user)
sa.Index("ix_used_expires", used.c.expires)

KEPT = (orders, members, bans, audit)  # in a backup: all but the used nonces; the table first that writers lock


class TooManyPeers(Exception):
    """A user has as many peers with valid passes as one may have."""


@dataclass(frozen=True)
class RegisteredMember:
    """A peer that has had a pass. Times are Unix seconds; proven: when its user last proved who they are."""

    peer_id: str
    user: str
    way: str
    joined: float
    proven: float
    expires: float


class MemberStore:
    """A database by its SQLAlchemy URL. Raises UsageError for a URL that is none, DatabaseDown for no answer."""

    def __init__(self, url: str):
        self._database = Database(url, "the authority's database")
        self._transaction, self.close = self._database.transaction, self._database.close

    @property
    def founded(self) -> bool:
        """Tell whether `found` has been called on this database."""
        with self._transaction() as connection:
            if not sa.inspect(connection).has_table(orders.name):
                return False
            return connection.execute(sa.select(orders.c.id)).first() is not None

    def found(self, now: float) -> None:
        """Make the tables and the first notice."""
        with self._transaction() as connection:
            metadata.create_all(connection)
            if connection.execute(sa.select(orders.c.id)).first() is None:
                connection.execute(sa.insert(orders).values(id=1, number=int(now), changed=now, paused="", order=0))
        self._database.protect()

    def use_nonce(self, nonce: str, expires: float, now: float) -> bool:
        """Mark a nonce as used. False when it was already, in whatever process."""
        try:
            with self._transaction() as connection:
                connection.execute(sa.delete(used).where(used.c.expires < now))
                connection.execute(sa.insert(used).values(nonce=nonce, expires=expires))
        except IntegrityError:
            return False
        return True

    def admit(self, member: RegisteredMember, now: float, most_peers: int) -> None:
        """Write down that this peer gets a pass. Raises TooManyPeers."""
        with self._transaction() as connection:
            connection.execute(sa.select(orders.c.id).with_for_update())  # one after the other, in PostgreSQL too
            others = connection.execute(
                sa.select(sa.func.count())
                .select_from(members)
                .where(members.c.user == member.user, members.c.expires > now, members.c.peer_id != member.peer_id)
            ).scalar_one()
            if others >= most_peers:
                raise TooManyPeers
            known = sa.update(members).where(members.c.peer_id == member.peer_id)
            values = {"user": member.user, "way": member.way, "proven": member.proven, "expires": member.expires}
            if connection.execute(known.values(**values)).rowcount == 0:
                connection.execute(sa.insert(members).values(peer_id=member.peer_id, joined=member.joined, **values))

    def member(self, peer_id: str) -> RegisteredMember | None:
        """A peer, as the store knows it."""
        with self._transaction() as connection:
            row = connection.execute(sa.select(members).where(members.c.peer_id == peer_id)).mappings().first()
        return None if row is None else RegisteredMember(**row)

    def members(self) -> list[RegisteredMember]:
        """All peers that have had a pass, those of a user together."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(members).order_by(members.c.user, members.c.joined)).mappings()
            return [RegisteredMember(**row) for row in rows]

    def notice(self, run: str) -> Notice:
        """The bans and orders in force."""
        with self._transaction() as connection:
            row = connection.execute(sa.select(orders)).one()
            banned = connection.execute(sa.select(bans.c.kind, bans.c.name)).all()
        return Notice(
            run=run,
            number=row.number,
            issued=row.changed,
            banned_users=frozenset(name for kind, name in banned if kind == "user"),
            banned_peers=frozenset(name for kind, name in banned if kind == "peer"),
            paused=row.paused,
            rollback=None if row.step is None else RollBack(row.step, row.digest, row.source, row.order),
        )

    def bans(self) -> list[dict[str, Any]]:
        """Bans: of whom, since when and why."""
        with self._transaction() as connection:
            return _rows(connection, sa.select(bans).order_by(bans.c.at))

    def ban(self, kind: str, name: str, reason: str, now: float) -> None:
        """Ban a "user" or a "peer"; again: another reason."""
        with self._transaction() as connection:
            _renumber(connection, now)
            connection.execute(sa.delete(bans).where(bans.c.kind == kind, bans.c.name == name))
            connection.execute(sa.insert(bans).values(kind=kind, name=name, at=now, reason=reason))

    def unban(self, kind: str, name: str, now: float) -> bool:
        """Take a ban back. False where there was none."""
        with self._transaction() as connection:
            _renumber(connection, now)
            return connection.execute(sa.delete(bans).where(bans.c.kind == kind, bans.c.name == name)).rowcount > 0

    def pause(self, reason: str, now: float) -> None:
        """Have the run wait; "" lets it go on."""
        with self._transaction() as connection:
            connection.execute(sa.update(orders).values(paused=reason))
            _renumber(connection, now)

    def roll_back(self, step: int, digest: str, source: str, now: float) -> int:
        """Order the way back to a checkpoint. Returns the order's number."""
        with self._transaction() as connection:
            _renumber(connection, now)
            order = int(connection.execute(sa.select(orders.c.order)).scalar_one()) + 1
            order = max(order, int(now))  # so that a database restored from a backup repeats none
            connection.execute(sa.update(orders).values(step=step, digest=digest, source=source, order=order))
            return order

    def write_down(self, now: float, who: str, what: str, peer_id: str = "", detail: str = "") -> None:
        """Add to the audit trail. Nobody's token may be in `detail`."""
        entry = {"at": now, "who": who[:128], "what": what[:32], "peer_id": peer_id[:128], "detail": detail[:500]}
        with self._transaction() as connection:
            number = int(connection.execute(sa.insert(audit).values(**entry).returning(audit.c.id)).scalar_one())
            if number % _PRUNE_EVERY == 0:
                old = audit.c.id <= number - MOST_AUDITED
                connection.execute(sa.delete(audit).where(old, audit.c.what.not_in(SPARED)))

    def trail(self, last: int) -> list[dict[str, Any]]:
        """The last so many entries, oldest first; what strangers can have written is at most half of more."""
        newest, spared = sa.select(audit).order_by(audit.c.id.desc()).limit(last), audit.c.what.in_(SPARED)
        with self._transaction() as connection:
            kept, others = _rows(connection, newest.where(spared)), _rows(connection, newest.where(~spared))
        others = others[: max(last // 2, last - len(kept))]
        return sorted(kept[: last - len(others)] + others, key=lambda entry: int(entry["id"]))

    def dump(self) -> dict[str, list[dict[str, Any]]]:
        """All that a backup holds."""
        with self._transaction() as connection:
            return {table.name: _rows(connection, sa.select(table).order_by(*table.primary_key)) for table in KEPT}

    def load(self, content: dict[str, list[dict[str, Any]]], now: float) -> None:
        """Replace everything by a dump. Raises LookupError or ValueError for what is none."""
        try:
            with self._transaction() as connection:
                metadata.create_all(connection)
                for table in KEPT:
                    connection.execute(sa.delete(table))
                    if rows := content[table.name]:
                        names = [column.name for column in table.c if column is not audit.c.id]
                        connection.execute(sa.insert(table), [{name: row[name] for name in names} for row in rows])
                _renumber(connection, now)
        except IntegrityError as error:
            raise ValueError("entries that contradict each other") from error
        self._database.protect()


def _rows(connection: sa.Connection, query: sa.Select[Any]) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _renumber(connection: sa.Connection, now: float) -> None:
    """A later notice has a higher number, also after the database was restored from an older one: hence the clock.

    First of all in a transaction: in PostgreSQL too, what else changes the notice waits for it.
    """
    number = int(connection.execute(sa.select(orders.c.number).with_for_update()).scalar_one())
    connection.execute(sa.update(orders).values(number=max(number + 1, int(now)), changed=now))

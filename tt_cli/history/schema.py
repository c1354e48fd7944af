"""Tables of what an auxiliary peer remembers of its run. Times are Unix seconds, compute times are seconds.

A step that an organiser's order took back stays in its row, with the order's number in `undone`; of what is still part
of the run `undone` is 0. Text of peers is cut to the columns' lengths before it is written.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, String, Table, Text

SCHEMA = 1

metadata = MetaData()

about = Table(  # "schema", "run", and marks of what has been done once
    "about",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
now = Table(  # the newest of what changes: "snapshot" (JSON), "model" (JSON), "part NAME" (words)
    "now",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    Column("time", Double, nullable=False),
)
steps = Table(
    "steps",
    metadata,
    Column("undone", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("era", BigInteger, nullable=False),  # see tt_cli.swarm.membership.orders
    Column("time", Double, nullable=False),
    Column("loss", Double, nullable=False),
    Column("trainers", Integer, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("samples_per_second", Double, nullable=False),
)
contributions = Table(  # of the newest steps, see Store.tidy; `peers` and `hours` hold the sums
    "contributions",
    metadata,
    Column("undone", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("peer_id", String(128), primary_key=True),
    Column("user", String(80), primary_key=True),
    Column("samples", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
)
peers = Table(
    "peers",
    metadata,
    Column("peer_id", String(128), primary_key=True),
    Column("user", String(80), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("device", String(80), nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("told", BigInteger, nullable=False),  # total_samples of its last record, from which growth is counted
    Column("progressed", Double, nullable=False),  # when `told` last changed
)
hours = Table(  # what was given in each of the last hours
    "hours",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),  # Unix time / 3600
    Column("peer_id", String(128), primary_key=True),
    Column("user", String(80), primary_key=True),
    Column("samples", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
)
activity = Table(
    "activity",
    metadata,
    Column("time", Double, primary_key=True),
    Column("trainers", Integer, nullable=False),
    Column("samples_per_second", Double, nullable=False),
)
rounds = Table(
    "rounds",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("step", BigInteger, nullable=False),
    Column("time", Double, nullable=False),
    Column("words", String(200), nullable=False),
)
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("url", String(500)),
    Column("heldout_loss", Double),
)
pictures = Table(
    "pictures",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("prompt", String(300), primary_key=True),
    Column("file", String(200), nullable=False),  # in the run folder's `pictures`
)

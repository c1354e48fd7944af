"""Tables of what an auxiliary peer remembers of its run. Times are Unix seconds, compute times are seconds.

A step that an organiser's order took back stays in its row, with the order's number in `undone`; of what is still part
of the run `undone` is 0, of what is doubted −1. Text of peers is cut to the columns' lengths before it is written.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, String, Text

from tt_cli.database import make_table

SCHEMA = 1

metadata = MetaData()
_table = partial(make_table, metadata)

PEER = {"peer_id": String(128), "user": String(80)}
GIVEN = {"samples": BigInteger, "seconds": Double}

# "schema", "run", and marks of what has been done once
about = _table("about", {"key": String(64)}, value=Text)
# the newest of what changes: "snapshot" (JSON), "model" (JSON), "part NAME" (words)
now = _table("now", {"key": String(64)}, value=Text, time=Double)
steps = _table(
    "steps",
    {"undone": BigInteger, "step": BigInteger},
    era=BigInteger,  # see tt_cli.swarm.membership.orders
    time=Double,
    loss=Double,
    trainers=Integer,
    samples=BigInteger,
    samples_per_second=Double,
)
# of the newest steps that no order took back, see HistoryWriter.tidy; `peers` and `hours` hold the sums
contributions = _table("contributions", {"undone": BigInteger, "step": BigInteger, **PEER}, **GIVEN)
peers = _table(
    "peers",
    PEER,
    role=String(16),
    device=String(80),
    first_seen=Double,
    last_seen=Double,
    **GIVEN,
    told=BigInteger,  # total_samples of its last record, from which growth is counted
    progressed=Double,  # when `told` last changed
)
# what was given in each of the last hours; hour: Unix time / 3600
hours = _table("hours", {"hour": BigInteger, **PEER}, **GIVEN)
activity = _table("activity", {"time": Double}, trainers=Integer, samples_per_second=Double)
rounds = _table("rounds", {}, Column("id", Integer, primary_key=True), step=BigInteger, time=Double, words=String(200))
checkpoints = _table(
    "checkpoints",
    {"step": BigInteger},
    Column("url", String(500)),
    Column("heldout_loss", Double),
    time=Double,
    digest=String(64),
    bytes=BigInteger,
)
# file: in the run folder's `pictures`
pictures = _table("pictures", {"step": BigInteger, "prompt": String(300)}, file=String(200))

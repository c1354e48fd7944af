"""The tables of peers and of contributions. The columns of peers follow from the figures that `PeerView` declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.text import Text

from tt_cli.monitor.scene import SILENT, middle_speed, peer_name, remarks
from tt_cli.swarm.records.snapshot import PeerView, SwarmNow
from tt_cli.terminal.format import (
    NONE,
    byte_count,
    clean,
    duration,
    fit,
    loss_value,
    percent,
    plural,
    rate,
    short_digest,
    short_id,
)
from tt_cli.terminal.table import Column, table
from tt_cli.web.schemas import Leader

PEER_ID = 46
"""Characters of the shortest peer id; no user name is as long."""
WRITTEN: Mapping[str, tuple[int, int, Callable[[Any], str]]] = {
    "text": (10, 28, lambda text: clean(text) or NONE),
    "digest": (8, 8, short_digest),
    "link": (6, 6, lambda client: "client" if client else "direct"),
    "yes or no": (3, 3, lambda true: "yes" if true else "no"),
    "figures": (12, 48, lambda means: ", ".join(f"{name} {loss_value(mean)}" for name, mean in means.items()) or NONE),
    "count": (6, 13, lambda count: NONE if count is None else f"{count:,}"),
    "bytes": (9, 9, byte_count),
    "per second": (9, 9, rate),
    "share": (5, 5, percent),
    "seconds": (8, 12, duration),
    "loss": (7, 9, loss_value),
}
"""By unit: least and most cells of a column, and how a value is written."""
WORDS = ("text", "digest", "link", "yes or no", "figures")
"""Units of what stands at the left of its column, and is sorted from the smallest on."""
BESIDE = ("role", "device", "samples_per_second", "share", "lag", "client_mode", "state", "round", "age_s")
"""The columns after the peer's name, in their order; those of all other figures follow."""


@dataclass(frozen=True)
class PeerRow:
    """A peer and what is to be said about it."""

    peer: PeerView
    name: str
    remarks: list[str]


def peer_rows(swarm: SwarmNow | None) -> list[PeerRow]:
    """Rows of a snapshot, one of each peer."""
    if swarm is None:
        return []
    middle = middle_speed(swarm)
    return [PeerRow(peer, peer_name(peer, swarm), remarks(peer, swarm.trainers, middle)) for peer in swarm.peers]


def _state(row: PeerRow) -> Text:
    if row.remarks:
        return Text("; ".join(row.remarks), style="bold red" if row.peer.accused_by else "yellow")
    if row.peer.role == "aux":
        return Text(f"keeps step {row.peer.epoch:,}")
    return Text("in step", style="green")


def _of_trainers(text: Callable[[PeerView], str]) -> Callable[[PeerRow], str]:
    return lambda row: text(row.peer) if row.peer.role == "trainer" else NONE


SAID: Mapping[str, Callable[[PeerRow], Text | str]] = {
    "role": lambda row: Text(row.peer.role, style="dim"),
    "samples_per_second": _of_trainers(lambda peer: rate(peer.samples_per_second)),
    "share": _of_trainers(lambda peer: percent(peer.share)),
    "age_s": lambda row: Text(duration(row.peer.age_s), style="yellow" if row.peer.age_s > SILENT else "dim"),
}
"""Cells that say more than the figure's value."""


def declared(name: str) -> dict[str, Any]:
    """Label, unit, cells and worth of a figure of a peer, as `peer_record.figure` declares them."""
    shown = PeerView.model_fields[name].json_schema_extra
    assert isinstance(shown, dict), f"{name} is declared without `figure`"
    return shown


def written(peer: PeerView, name: str) -> str:
    """A figure's value in words."""
    return WRITTEN[declared(name)["unit"]][2](getattr(peer, name))


def others(peer: PeerView) -> list[str]:
    """Label and value of the figures that have no column of their own on most terminals, but for what is nothing."""
    names = [name for name in PeerView.model_fields if name not in NAMES and not declared(name).get("keep")]
    return [f"{declared(name)['label']} {written(peer, name)}" for name in names if getattr(peer, name)]


def _column(name: str) -> Column[PeerRow]:
    shown = declared(name)
    least, most, _ = WRITTEN[shown["unit"]]
    least, most = shown.get("cells", (least, most))
    words = shown["unit"] in WORDS

    def value(row: PeerRow) -> str | float:
        figure = getattr(row.peer, name)
        return str(figure).lower() if words else -1.0 if figure is None else float(figure)

    return Column(
        title=shown["label"],
        least=max(least, len(shown["label"]) + 1),  # and the arrow
        most=most,
        keep=shown.get("keep", 0),
        text=SAID.get(name, lambda row: written(row.peer, name)),
        by=value,
        right=not words,
        falls=not words and name != "age_s",
    )


NAMES = ("peer_id", "user")
PEER = Column[PeerRow](
    "peer", 14, 24, 10, lambda row: Text(row.name, style="bold"), lambda row: row.name.lower(), fair=18
)
STATE = Column[PeerRow]("state", 11, 44, 8, _state, lambda row: len(row.remarks), falls=True, fair=24)
PEER_COLUMNS: Sequence[Column[PeerRow]] = (
    PEER,
    *(STATE if name == "state" else _column(name) for name in BESIDE),
    *(_column(name) for name in PeerView.model_fields if name not in (*NAMES, *BESIDE)),
)


def peers_table(swarm: SwarmNow, width: int, height: int) -> list[Text]:
    """A heading and the peers, at most `height` lines; what does not fit is counted in the last line."""
    rows = peer_rows(swarm)
    if height < 2 or not rows:
        return []
    shown = rows if len(rows) < height else rows[: height - 2]
    lines = table(PEER_COLUMNS, shown, width)
    if len(shown) < len(rows):
        lines.append(fit(Text(f"and {plural(len(rows) - len(shown), 'more peer')}", style="dim"), width))
    return lines


@dataclass(frozen=True)
class LeaderRow:
    """A user's place by samples, 1 for the most. name: of who is nobody, the end of the peer id."""

    place: int
    name: str
    leader: Leader
    now: float


def leader_name(leader: Leader) -> str:
    """Peer ids are long and begin alike."""
    user = clean(leader.user)
    return short_id(user) if len(user) >= PEER_ID and user.isalnum() else user or NONE


def leader_rows(leaders: Sequence[Leader], now: float) -> list[LeaderRow]:
    """In the order of their samples. now: Unix seconds."""
    ordered = sorted(leaders, key=lambda leader: (-leader.samples, leader.user))
    return [LeaderRow(place, leader_name(leader), leader, now) for place, leader in enumerate(ordered, 1)]


_number = partial(Column[LeaderRow], right=True, falls=True)
LEADER_COLUMNS: Sequence[Column[LeaderRow]] = (
    Column("#", 3, 6, 6, lambda row: Text(f"{row.place:,}", style="dim"), lambda row: row.place, right=True),
    Column("user", 12, 40, 10, lambda row: Text(row.name, style="bold"), lambda row: row.name.lower()),
    _number("samples", 12, 16, 9, lambda row: f"{row.leader.samples:,}", lambda row: row.leader.samples),
    _number(
        "compute time", 13, 14, 8, lambda row: duration(row.leader.seconds or None), lambda row: row.leader.seconds
    ),
    _number("share", 6, 6, 7, lambda row: percent(row.leader.share), lambda row: row.leader.share),
    _number("peers", 6, 7, 4, lambda row: f"{row.leader.peers:,}", lambda row: row.leader.peers),
    _number("seen", 12, 12, 5, lambda row: duration(row.now - row.leader.last_seen), lambda row: row.leader.last_seen),
)

"""The columns of the tables of peers and of contributions: what a cell says, and what it sorts by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from tt_cli.monitor.scene import SILENT, Scene, middle_speed, remarks
from tt_cli.swarm.records.snapshot import PeerView
from tt_cli.terminal.format import NONE, clean, duration, fit, percent, rate, short_id
from tt_cli.terminal.swarm_lines import peer_name
from tt_cli.web.schemas import Leader

Row = TypeVar("Row")

NEEDED = 6

PEER_ID = 46
"""Characters of the shortest peer id; no user name is as long."""


@dataclass(frozen=True)
class SortableColumn(Generic[Row]):
    """least, most: cells. keep: where there is too little room, columns with the smallest are left out first.

    fair: cells that the needed columns have before others (keep below NEEDED) are shown beside them; 0 for `least`.
    by: what to sort by. falls: sorted by it, the largest comes first.
    """

    title: str
    least: int
    most: int
    keep: int
    text: Callable[[Row], Text | str]
    by: Callable[[Row], str | float]
    right: bool = False
    falls: bool = False
    fair: int = 0


@dataclass(frozen=True)
class PeerRow:
    """A peer and what is to be said about it."""

    peer: PeerView
    name: str
    remarks: list[str]


def peer_rows(scene: Scene) -> list[PeerRow]:
    """One of each peer of the newest snapshot."""
    if scene.snapshot is None:
        return []
    middle, trainers = middle_speed(scene.snapshot), scene.snapshot.trainers
    return [PeerRow(peer, peer_name(vars(peer)), remarks(peer, trainers, middle)) for peer in scene.snapshot.peers]


def _state(row: PeerRow) -> Text:
    if row.remarks:
        return Text("; ".join(row.remarks), style="bold red" if row.peer.accused_by else "yellow")
    if row.peer.role == "aux":
        return Text(f"keeps step {row.peer.epoch:,}")
    return Text("in step", style="green")


def _share(row: PeerRow) -> str:
    return percent(row.peer.share) if row.peer.role == "trainer" else NONE


def _link(row: PeerRow) -> str:
    return "client" if row.peer.client_mode else "direct"


PEER_COLUMNS: Sequence[SortableColumn[PeerRow]] = (
    SortableColumn("peer", 14, 24, 10, lambda row: Text(row.name, style="bold"), lambda row: row.name.lower(), fair=18),
    SortableColumn("role", 7, 9, 3, lambda row: Text(row.peer.role, style="dim"), lambda row: row.peer.role),
    SortableColumn(
        "device", 10, 28, 2, lambda row: clean(row.peer.device) or NONE, lambda row: row.peer.device.lower()
    ),
    SortableColumn(
        "samples/s",
        9,
        9,
        9,
        lambda row: rate(row.peer.samples_per_second) if row.peer.role == "trainer" else NONE,
        lambda row: row.peer.samples_per_second if row.peer.role == "trainer" else -1.0,
        right=True,
        falls=True,
    ),
    SortableColumn("share", 5, 5, 7, _share, lambda row: row.peer.share, right=True, falls=True),
    SortableColumn("lag", 3, 6, 6, lambda row: f"{row.peer.lag:,}", lambda row: row.peer.lag, right=True, falls=True),
    SortableColumn("link", 6, 6, 5, _link, _link),
    SortableColumn("state", 11, 44, 8, _state, lambda row: len(row.remarks), falls=True, fair=24),
    SortableColumn("last round", 16, 60, 1, lambda row: clean(row.peer.round) or NONE, lambda row: row.peer.round),
    SortableColumn(
        "seen",
        8,
        12,
        4,
        lambda row: Text(duration(row.peer.age_s), style="yellow" if row.peer.age_s > SILENT else "dim"),
        lambda row: row.peer.age_s,
        right=True,
    ),
)


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


def _compute(row: LeaderRow) -> str:
    return duration(row.leader.seconds or None)


def _seen(row: LeaderRow) -> str:
    return f"{duration(row.now - row.leader.last_seen)} ago"


LEADER_COLUMNS: Sequence[SortableColumn[LeaderRow]] = (
    SortableColumn("#", 3, 6, 6, lambda row: Text(f"{row.place:,}", style="dim"), lambda row: row.place, right=True),
    SortableColumn(
        "user",
        12,
        40,
        10,
        lambda row: Text(row.name, style="bold"),
        lambda row: row.name.lower(),
    ),
    SortableColumn(
        "samples",
        9,
        16,
        9,
        lambda row: f"{row.leader.samples:,}",
        lambda row: row.leader.samples,
        right=True,
        falls=True,
    ),
    SortableColumn("compute time", 12, 14, 8, _compute, lambda row: row.leader.seconds, right=True, falls=True),
    SortableColumn(
        "share", 5, 5, 7, lambda row: percent(row.leader.share), lambda row: row.leader.share, right=True, falls=True
    ),
    SortableColumn(
        "peers", 5, 7, 4, lambda row: f"{row.leader.peers:,}", lambda row: row.leader.peers, right=True, falls=True
    ),
    SortableColumn("seen", 10, 16, 5, _seen, lambda row: row.leader.last_seen, right=True, falls=True),
)


def widths(columns: Sequence[SortableColumn[Row]], width: int) -> dict[int, int]:
    """Cells of each column that has room in `width`, two spaces apart: all but fixed ones grow, the needed first."""
    shown = list(range(len(columns)))
    least = [max(column.least, len(column.title) + 1) for column in columns]  # and the arrow
    fair = [max(least[i], column.fair) for i, column in enumerate(columns)]
    for i in sorted(shown, key=lambda i: columns[i].keep):
        if columns[i].keep < NEEDED and sum(fair[j] for j in shown) + 2 * (len(shown) - 1) > width:
            shown.remove(i)
    while len(shown) > 1 and sum(least[i] for i in shown) + 2 * (len(shown) - 1) > width:
        shown.remove(min(shown, key=lambda i: columns[i].keep))
    cells = {i: least[i] for i in shown}
    free = width - sum(cells.values()) - 2 * (len(shown) - 1)
    for i in sorted(shown, key=lambda i: -columns[i].keep):
        more = max(0, min(free, columns[i].most - cells[i]))
        cells[i] += more
        free -= more
    return cells


def heading(columns: Sequence[SortableColumn[Row]], cells: dict[int, int], sorted_by: int, falling: bool) -> Text:
    """The titles; the one that is sorted by has an arrow and a line below."""
    line = Text()
    for i, width in cells.items():
        title = columns[i].title
        if i == sorted_by:
            title = f"{title[: width - 1]}{'▼' if falling else '▲'}"
        cell = Text(title.rjust(width) if columns[i].right else title.ljust(width))
        cell.stylize("bold underline" if i == sorted_by else "dim")
        line.append("  " if line else "").append_text(fit(cell, width))
    return line


def row_line(columns: Sequence[SortableColumn[Row]], cells: dict[int, int], row: Row) -> Text:
    """One row, each cell cut to its width."""
    line = Text()
    for i, width in cells.items():
        text = columns[i].text(row)
        cell = fit(text if isinstance(text, Text) else Text(text), width)
        gap = " " * (width - cell.cell_len)
        line.append("  " if line else "")
        line.append_text(Text(gap).append_text(cell) if columns[i].right else cell.append(gap))
    return line

"""The run's history in a database: SQLite here; test_postgres.py does the same in PostgreSQL."""

from __future__ import annotations

import sqlite3
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert, select
from swarm.made import record

from tt_cli.database import DatabaseDown
from tt_cli.errors import UsageError
from tt_cli.history import writer as room
from tt_cli.history.reader import HistoryReader
from tt_cli.history.schema import contributions, steps
from tt_cli.history.writer import HistoryWriter, MadeStep, OtherDatabase, database_url, sane
from tt_cli.swarm.records.peer_record import PeerRecord

RUN = "emoji-12345678"


def made(step: int, at: float | None = None, *, era: int = 0, loss: float = 2.5, words: str = "") -> MadeStep:
    return MadeStep(step, era, 1000.0 + step if at is None else at, loss, 2, 40.0, words)


def seen(peer: str, total: int, user: str = "", role: str = "trainer") -> PeerRecord:
    return record(peer, user=user, role=role, device="cpu", total_samples=total)


def add_steps(url: str, count: int) -> None:
    """Steps from 1 on, as if they had been recorded."""
    row = {"undone": 0, "era": 0, "loss": 2.5, "trainers": 1, "samples": 0, "samples_per_second": 1.0}
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(insert(steps), [{**row, "step": step, "time": float(step)} for step in range(1, count + 1)])
    engine.dispose()


def contributions_to(url: str, step: int) -> list[dict[str, Any]]:
    """Rows of those who gave something for a step, most first."""
    table, engine = contributions, create_engine(url)
    query = select(table.c.peer_id, table.c.user, table.c.samples, table.c.seconds).order_by(table.c.samples.desc())
    with engine.connect() as connection:
        rows = connection.execute(query.where(table.c.undone == 0, table.c.step == step)).mappings().all()
    engine.dispose()
    return [dict(row) for row in rows]


def open_both(url: str) -> tuple[HistoryWriter, HistoryReader]:
    return HistoryWriter(url, RUN), HistoryReader(url)


def the_story(url: str) -> None:
    """What both databases must tell alike."""
    store, reader = open_both(url)
    assert store.losses() == [] and reader.steps_after(0) == [] and reader.leaderboard() == []
    store.record_step(made(1, words="step 1 made by 2 peers"), [seen("a", 10, "ada"), seen("b", 5)], 100)
    store.record_step(made(2), [seen("a", 40, "ada"), seen("b", 25), seen("x", 0, role="aux")], 100)
    store.record_step(made(2, loss=9.0), [seen("a", 40, "ada")], 100)  # seen by a second recorder too
    assert store.losses() == [(1, 2.5, 1001.0), (2, 2.5, 1002.0)]
    assert reader.steps_after(1) == [(2, 1002.0, 2.5, 2, 40.0)]
    given = [(row["peer_id"], row["samples"], row["seconds"]) for row in contributions_to(url, 2)]
    assert given == [("a", 30, 1.0), ("b", 20, 1.0)]
    board = [(row["user"], row["samples"], row["seconds"], row["peers"], row["share"]) for row in reader.leaderboard()]
    assert board == [("ada", 40, 1.0, 1, pytest.approx(40 / 65)), ("b", 25, 1.0, 1, pytest.approx(25 / 65))]
    assert [row["user"] for row in reader.leaderboard(since=1002.0 - 3600)] == ["ada", "b"]
    assert reader.leaderboard(since=1002.0 + 3600) == []
    assert [(row["peer_id"], row["role"]) for row in reader.peers()] == [
        ("a", "trainer"),
        ("b", "trainer"),
        ("x", "aux"),
    ]
    assert reader.totals() == {"peers": 2, "devices": 1, "samples": 65, "seconds": 2.0}
    assert reader.rounds() == [{"step": 1, "time": 1001.0, "words": "step 1 made by 2 peers"}]
    store.record_activity(1003.0, 3, 2, 40.0, [seen("a", 45, "ada")], 100)
    assert reader.activity() == [(1003.0, 2, 40.0)]
    store.record_step(made(3), [], 100)
    store.go_back(1, 7)
    store.record_step(made(2, era=7, loss=1.0), [], 100)
    store.go_back(1, 7)  # told once more, as after a kill in between
    assert [row[:2] for row in store.losses()] == [(1, 2.5), (2, 1.0)]
    back = reader.era()
    assert back and reader.totals()["samples"] == 70
    for _ in range(2):
        store.record_step(made(4), [], 100)  # of the era before
        store.record_step(made(5, era=7), [], 100)
        for _ in range(2):
            store.doubt(2)
            assert [row[:2] for row in store.losses()] == [(1, 2.5), (2, 1.0)]
    doubted = reader.era()
    store.record_step(made(6, era=7), [], 100)  # what follows on them
    assert [row[0] for row in store.losses()] == [1, 2, 5, 6] and reader.era() != doubted != back
    assert reader.taken_back(0) == (7, 2) and reader.taken_back(7) is None, "no order of the organiser's"
    store.doubt(2)
    store.put("snapshot", '{"a": 1}', 5.0)
    store.put("snapshot", '{"a": 2}', 6.0)
    assert reader.newest("snapshot") == ('{"a": 2}', 6.0) and reader.newest("model") is None
    store.add_checkpoint(2, 9.0, "d" * 64, 1000)
    store.add_checkpoint(2, 9.0, "d" * 64, 1000, heldout_loss=3.5)
    store.add_pictures(2, [("a red apple", "2-0.png")])
    assert reader.checkpoints() == [
        {"step": 2, "time": 9.0, "digest": "d" * 64, "bytes": 1000, "url": None, "heldout_loss": 3.5}
        | {"pictures": [{"prompt": "a red apple", "file": "2-0.png"}]}
    ]
    store.add_pictures(3, [("a red apple", "3-0.png")])
    store.drop_pictures([2])
    assert reader.checkpoints()[0]["pictures"] == []
    store.tell_part("publisher", "waits")
    assert [(row["name"], row["words"]) for row in reader.parts()] == [("publisher", "waits")]
    store.tidy(1000.0 + 60 * 86400)
    assert reader.leaderboard()[0]["samples"] == 45 and reader.leaderboard(since=0.0) == []
    store.close()
    reader.close()


def test_the_story(tmp_path: Path) -> None:
    the_story(database_url(tmp_path))
    assert (tmp_path / "history.db").stat().st_mode & 0o777 == 0o600


def late_steps_are_taken_back_too(url: str) -> None:
    """One recorder was slower than the order, or its database was away: what it tells then is there under the order."""
    store, reader = open_both(url)
    for step in (1, 2, 3):
        store.record_step(made(step), [seen("a", 10 * step)], 100)
    store.go_back(1, 7)
    late = HistoryWriter(url, RUN)
    late.record_step(made(3), [seen("a", 40)], 100)
    shown = reader.era()
    late.go_back(1, 7)
    assert reader.era() != shown, "a page would show what was late for ever"
    assert [row[0] for row in store.losses()] == [1] and reader.taken_back(0) == (7, 2)
    assert [row["samples"] for row in reader.leaderboard()] == [40] and contributions_to(url, 3) == []
    for one in (store, late, reader):
        one.close()


def test_late_steps_are_taken_back_too(tmp_path: Path) -> None:
    late_steps_are_taken_back_too(database_url(tmp_path))


def test_nobody_is_credited_with_more_than_a_step_holds(tmp_path: Path) -> None:
    store, reader = open_both(database_url(tmp_path))
    store.record_step(made(1), [seen("liar", 10**12), seen("a", 50)], 100)
    for at in range(5):
        store.record_activity(1010.0 + at, 2, 1, 1.0, [seen("liar", 10**12 - at % 2)], 100)
    assert [(row["user"], row["samples"]) for row in reader.leaderboard()] == [("liar", 400), ("a", 50)]
    store.record_step(made(11), [seen("a", 1000)], 100)  # nobody looked for ten steps
    assert contributions_to(database_url(tmp_path), 11) == [
        {"peer_id": "a", "user": "", "samples": 950, "seconds": 10.0}
    ]


def test_a_peer_that_began_anew_and_one_that_was_away(tmp_path: Path) -> None:
    store, reader = open_both(database_url(tmp_path))
    for step, at, total in ((1, 1000.0, 50), (2, 1060.0, 80), (3, 9000.0, 20), (4, 9010.0, 20), (5, 9030.0, 30)):
        store.record_step(made(step, at), [seen("a", total)], 100)
    assert [(row["samples"], row["seconds"]) for row in reader.leaderboard()] == [(110, 60.0 + 30.0)]


def test_text_of_peers_is_one_sane_line() -> None:
    assert sane("a\nb\x00\x1b[31m\u202ec\ud800é" + "x" * 99, 10) == "ab[31mcéxx"


def test_what_is_kept_for_a_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KEPT_STEPS", 3), ("KEPT_ROUNDS", 2), ("MOST_PEERS", 3)):
        monkeypatch.setattr(room, name, value)
    store, reader = open_both(database_url(tmp_path))
    for step in range(1, 9):
        store.record_step(made(step, words=f"round {step}"), [seen(f"peer{step}", 10 * step)], 100)
        store.record_activity(1000.0 + 30 * step, step, 1, 1.0, [], 100)
    store.tidy(1000.0 + 30 * 86400)
    assert [bool(contributions_to(database_url(tmp_path), step)) for step in range(1, 9)] == [False] * 5 + [True] * 3
    assert [row["words"] for row in reader.rounds()] == ["round 7", "round 8"]
    assert len(reader.activity()) == 2, "one of ten minutes"
    assert [row["user"] for row in reader.leaderboard()] == ["", "peer8", "peer7", "peer6"]
    assert sum(row["samples"] for row in reader.leaderboard()) == 360
    assert len(store.losses()) == 8


def test_a_database_of_somebody_else_is_refused_in_one_line(tmp_path: Path) -> None:
    url = database_url(tmp_path)
    HistoryWriter(url, RUN).close()
    with pytest.raises(OtherDatabase, match=f"is of another run, {RUN}: name another with --database"):
        HistoryWriter(url, "other-00000000")
    with sqlite3.connect(tmp_path / "history.db") as plain:
        plain.execute("update about set value = '2' where key = 'schema'")
    plain.close()
    with pytest.raises(OtherDatabase, match="is of a newer version of tt"):
        HistoryWriter(url, RUN)
    for bad in ("nonsense", "mysql+pymysql://a:secret@b/c", "oracle8://x", "postgresql://a:secret@b:port/c"):
        with pytest.raises(UsageError, match="^--database: must be sqlite:///FILE or postgresql://") as caught:
            HistoryWriter(bad, RUN)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_file_is_set_aside_and_what_can_be_read_stays(whole: bool, tmp_path: Path) -> None:
    url, told = database_url(tmp_path), list[str]()
    store = HistoryWriter(url, RUN)
    add_steps(url, 5000)
    store.close()
    file = tmp_path / "history.db"
    content = bytearray(file.read_bytes())
    first = 0 if whole else len(content) // 2
    content[first : first + 8192] = b"\xa5" * 8192
    file.write_bytes(content)
    for day, suffix in product((1, 2, 3), ("", "-shm", "-wal")):
        file.with_name(f"history.db.damaged-2024010{day}-120000{suffix}").touch()
    store = HistoryWriter(url, RUN, told.append)
    assert len(told) == 1 and "history.db was damaged: it is history.db.damaged-" in told[0]
    kept = [step for step, _, _ in store.losses()]
    assert kept == [] if whole else (len(kept) < 5000 and (kept[0], kept[-1]) == (1, 5000))
    store.record_step(made(6000), [], 100)
    assert store.losses()[-1][0] == 6000
    store.close()
    assert len(list(tmp_path.glob("history.db.damaged-2024*"))) == 3, "of those before the last"
    assert len(list(tmp_path.glob("history.db.damaged-*"))) == 4


def test_only_the_coordinator_mends_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    file.write_bytes(b"no database at all" * 999)
    with pytest.raises(DatabaseDown, match="does not answer"):
        HistoryWriter(database_url(tmp_path), RUN, mends=False)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_what_is_told_after_the_file_was_replaced_is_in_the_new_one(tmp_path: Path) -> None:
    coordinator, other = (HistoryWriter(database_url(tmp_path), RUN, mends=mends) for mends in (True, False))
    coordinator.begin_anew()
    other.tell_part("publisher", "waits")
    assert [row["words"] for row in HistoryReader(database_url(tmp_path)).parts()] == ["waits"]


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DatabaseDown, match=r"^the database of the run's history does not answer \(unable to open"):
        HistoryWriter(database_url(tmp_path / "missing"), RUN)

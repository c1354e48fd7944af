"""The run's history in PostgreSQL: a real server, for this test alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from history.test_store import RUN, late_steps_are_taken_back_too, made, seen, the_story
from postgres_server import postgres_server

from tt_cli.database import Database
from tt_cli.history.reader import HistoryReader
from tt_cli.history.schema import metadata
from tt_cli.history.writer import HistoryWriter, OtherDatabase

pytestmark = pytest.mark.debian


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a database in a server of this module's own."""
    with postgres_server() as url:
        yield url


def emptied(url: str) -> None:
    database = Database(url, "it")
    with database.transaction() as connection:
        metadata.drop_all(connection)
    database.close()


def test_the_story(postgres: str) -> None:
    emptied(postgres)
    the_story(postgres)
    with pytest.raises(OtherDatabase, match="of another run"):
        HistoryWriter(postgres, "other-00000000")


def test_late_steps_are_taken_back_too(postgres: str) -> None:
    emptied(postgres)
    late_steps_are_taken_back_too(postgres)


def test_two_recorders_count_nothing_twice(postgres: str) -> None:
    emptied(postgres)
    HistoryWriter(postgres, RUN).close()
    gate = threading.Barrier(2, timeout=240)

    def record() -> None:
        store = HistoryWriter(postgres, RUN)
        for step in range(1, 31):
            gate.wait()
            store.record_step(made(step), [seen("a", 10 * step), seen("b", 5 * step)], 100)
        store.close()

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = HistoryReader(postgres)
    assert [step[0] for step in reader.steps_after(0)] == list(range(1, 31))
    assert [(row["user"], row["samples"]) for row in reader.leaderboard()] == [("a", 300), ("b", 150)]

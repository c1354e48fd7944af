"""The authority's database in PostgreSQL: a real server, for this test alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from auth.peers import Clock, Peer, closed_run, made_authority
from postgres_server import postgres_server

from tt_cli.auth.authority.authority_backup import back_up, restore
from tt_cli.auth.authority.issuer import RequestRefused
from tt_cli.auth.authority.member_store import MemberStore, RegisteredMember, TooManyPeers, metadata
from tt_cli.auth.authority.organiser import Organiser
from tt_cli.database import CONNECTION, DatabaseDown

pytestmark = pytest.mark.debian


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a database in a server of this module's own."""
    with postgres_server() as url:
        yield url


def test_it_does_there_what_it_does_in_sqlite(postgres: str, tmp_path: Path) -> None:
    run, clock, ada = closed_run(), Clock(), Peer()
    authority = made_authority(clock, postgres)
    text = authority.issue_here(ada.peer_id, "ada")
    clock.now += 1800
    text = ada.renewal(authority, text)
    before = authority.notice()[0]
    authority._notice = None
    with Organiser.at_work(run) as organiser:
        organiser.ban("user", "Mallory", "poison " * 100)  # of which as much is kept as there is room for
        organiser.pause("why")
        organiser.roll_back(3, "d" * 64, "a/s")
        assert [one.user for one in organiser.store.members()] == ["ada"]
        assert len(organiser.store.bans()[0]["reason"]) == 500
        assert len(organiser.store.trail(10)) == 3
    assert authority.notice()[0] > before
    trail = authority.store.trail(10)
    with authority.store._database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE audit SET at = at WHERE id < 3")  # to PostgreSQL they lie last then
    file = tmp_path / "backup.json"
    back_up(run, file, clock.now)
    with authority.store._database.engine.begin() as connection:
        metadata.drop_all(connection)
    with pytest.raises(DatabaseDown, match="does not answer"):
        authority.store.member(ada.peer_id)
    restore(run, file, clock.now)
    assert [entry["what"] for entry in authority.store.trail(10)] == [*(entry["what"] for entry in trail), "restored"]
    assert ada.renewal(authority, text)
    with pytest.raises(RequestRefused, match="Mallory is banned"):
        authority.issue_here(Peer(1).peer_id, "Mallory")
    authority.store.close()
    assert not list(authority.folder.path.glob("*.db"))


def test_a_server_that_is_gone_without_a_word_is_noticed(postgres: str) -> None:
    with closing(MemberStore(postgres)) as store, store._database.engine.connect() as connection:
        set_for_it = connection.connection.driver_connection.info.get_parameters()
    assert set_for_it.items() >= {name: str(value) for name, value in CONNECTION.items()}.items()


def test_of_many_at_the_same_time_one_gets_the_nonce_and_four_a_pass(postgres: str) -> None:
    stores = [MemberStore(postgres), MemberStore(postgres)]
    stores[0].found(0.0)
    before = stores[0].notice("run").number

    def at_once(ask: Callable[[MemberStore, int], object]) -> list[object]:
        with ThreadPoolExecutor(20) as pool:
            return list(pool.map(lambda number: ask(stores[number % 2], number), range(20)))

    def admitted(store: MemberStore, peer: int) -> bool:
        with suppress(TooManyPeers):
            store.admit(RegisteredMember(f"peer {peer // 2}", "grace", "token", 1.0, 1.0, 100.0), 1.0, 4)
            return True
        return False

    assert sorted(at_once(lambda store, _: store.use_nonce("n", 100.0, 50.0))) == [False] * 19 + [True]
    assert at_once(admitted).count(True) == 8  # each of four asked twice
    assert [member.user for member in stores[0].members()].count("grace") == 4
    at_once(lambda store, number: store.ban("user", f"user {number // 2}", "", 0.0))
    assert stores[0].notice("run").number == before + 20  # no two lists have one number
    for store in stores:
        store.close()

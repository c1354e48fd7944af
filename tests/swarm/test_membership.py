"""Whose pass counts, in every process, and who is banned."""

from __future__ import annotations

import multiprocessing
import resource
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tt_cli.identity.passes import Notice, Pass, begin_of, public_text, sign
from tt_cli.run import load_run
from tt_cli.swarm.membership import admission as room
from tt_cli.swarm.membership.admission import Admission, NoPass, NotAdmitted, admits, check_own_pass

KEY, OTHER_KEY = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
OPEN = load_run("emoji").replaced(
    {"membership.authority": "http://localhost", "membership.authority_key": public_text(KEY)}
)
RUN = OPEN.replaced({"membership.kind": "organisation", "membership.organisation": "org"})
NOW, HOUR = time.time(), 3600.0


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)


def pass_of(peer_id: str = "anna's", user: str = "Anna", run: str = RUN.identity, **changes: float) -> str:
    times = {"issued": NOW - HOUR, "expires": NOW + HOUR} | changes
    return sign(Pass(user, peer_id, run, **times), KEY)


def notice(number: int, users: str = "", peers: str = "", key: Ed25519PrivateKey = KEY, run: str = RUN.identity) -> str:
    banned = frozenset(users.split()), frozenset(peers.split())
    return sign(Notice(run, number, NOW, *banned, "", None), key)


def refused(membership: Admission, text: str, peer_id: str, now: float | None = None) -> str:
    with pytest.raises(NotAdmitted) as caught:
        membership.admit(text, peer_id, now)
    return str(caught.value)


def test_a_pass_admits_the_peer_that_it_was_issued_to() -> None:
    closed = Admission(RUN)
    assert closed.closed and closed.admit(pass_of(), "anna's") == "Anna"
    assert closed.admit(pass_of(), "anna's") == "Anna"  # from memory
    assert refused(closed, pass_of(), "mallory's") == "the pass was issued to another peer"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no pass was shown"),
        ("words", "malformed"),
        (pass_of(run="emoji-00000000"), "another run"),
        (pass_of(expires=NOW - 60), "expired"),
        (pass_of(issued=NOW + 600), "not yet valid"),
        (sign(Pass("Anna", "anna's", RUN.identity, NOW - HOUR, NOW + HOUR), OTHER_KEY), "forged"),
    ],
)
def test_what_is_no_valid_pass_admits_nobody(text: str, words: str) -> None:
    assert words in refused(Admission(RUN), text, "anna's")


def test_a_pass_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    closed = Admission(RUN)
    with pytest.raises(NotAdmitted, match="no pass was shown"):
        closed.admit_again("anna's")
    closed.admit(pass_of(expires=NOW + 100), "anna's")
    assert closed.admit_again("anna's") == "Anna"
    with pytest.raises(NotAdmitted, match="no pass was shown"):
        closed.admit_again("mallory's")
    closed.vouched(pass_of(expires=NOW + 50), "anna's", NOW)
    monkeypatch.setattr(time, "time", lambda: NOW + 90)
    assert closed.admit_again("anna's") == "Anna", "an older one in a record does not take its place"
    monkeypatch.setattr(time, "time", lambda: NOW + 200)
    with pytest.raises(NotAdmitted, match="expired"):
        closed.admit_again("anna's")
    closed.admit(pass_of(expires=NOW + HOUR), "anna's")
    assert closed.hear(notice(1, users="anna"))
    with pytest.raises(NotAdmitted, match="banned"):
        closed.admit_again("anna's")


def test_a_pass_in_memory_expires_too() -> None:
    closed, text = Admission(RUN), pass_of(expires=NOW + 100)
    assert closed.admit(text, "anna's", NOW) == "Anna"
    assert "expired" in refused(closed, text, "anna's", NOW + 200)
    assert "begins" in refused(closed, text, "anna's", NOW - 2 * HOUR)


def test_a_pass_in_memory_ends_with_the_key_that_signed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = f"{public_text(OTHER_KEY)} {public_text(KEY)} until 2026-12-01"
    run, until = RUN.replaced({"membership.authority_key": keys}), begin_of("2026-12-01")
    closed, text = Admission(run), pass_of(run=run.identity, issued=until - HOUR, expires=until + HOUR)
    assert closed.admit(text, "anna's", until - 1.0) == "Anna"
    monkeypatch.setattr(room, "VERIFIED_SECONDS", 0.0)
    assert "forged" in refused(closed, text, "anna's", until)


def test_memory_of_passes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_PASSES", 3)
    closed = Admission(RUN)
    for number in range(9):
        closed.admit(pass_of(f"peer {number}"), f"peer {number}")
    assert len(closed._passes) == 3


def test_an_open_run_admits_anybody_but_the_banned() -> None:
    anybody = Admission(OPEN)
    assert not anybody.closed and anybody.admit("", "mallory's") == "" and anybody.mine() == ""
    assert anybody.hear(notice(1, peers="mallory's"))
    assert "banned" in refused(anybody, "", "mallory's")
    assert admits(anybody, "", "anna's") and not admits(anybody, "", "mallory's")


def test_without_an_authority_nobody_can_ban() -> None:
    anybody = Admission(load_run("emoji"))
    assert not anybody.hear(notice(1, peers="mallory's")) and not anybody.is_banned("mallory's")
    assert anybody.notice() is None and anybody.notice_text() == ""


def test_a_banned_user_is_out_with_all_peers() -> None:
    closed = Admission(RUN)
    for peer in ("anna's", "anna's second"):
        closed.admit(pass_of(peer), peer)
    assert closed.hear(notice(1, users="ANNA"))
    assert closed.is_banned("anna's") and closed.is_banned("anna's second")
    assert "banned" in refused(closed, pass_of(), "anna's")
    assert "banned" in refused(closed, pass_of("a third"), "a third")
    assert closed.vouched(pass_of(), "anna's", NOW) == "Anna", "what was signed before is still what it was"


def test_only_a_newer_notice_of_the_authority_counts() -> None:
    closed = Admission(RUN)
    assert closed.hear(notice(5, peers="mallory's"))
    assert not closed.hear(notice(5)) and not closed.hear(notice(4))
    assert not closed.hear(notice(9, key=OTHER_KEY)) and not closed.hear("words")
    assert not closed.hear(notice(9, run="emoji-00000000"))
    assert closed.is_banned("mallory's")
    assert closed.hear(notice(6)) and not closed.is_banned("mallory's")
    found = closed.notice()
    assert found is not None and found.number == 6 and closed.notice_text() == notice(6)


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    mine = Admission(RUN, tmp_path / "trainer.key")
    assert mine.mine() == "" and mine.notice() is None
    with pytest.raises(NoPass, match="no pass was shown"):
        check_own_pass(mine, "anna's", RUN)
    (tmp_path / "trainer.pass").write_text(pass_of(expires=NOW - 60) + "\n")
    with pytest.raises(NoPass, match="expired"):
        check_own_pass(mine, "anna's", RUN)
    (tmp_path / "trainer.pass").write_text(pass_of() + "\n")
    check_own_pass(mine, "anna's", RUN)
    assert mine.mine() == pass_of()
    (tmp_path / "notice").write_text(notice(1, users="anna"))
    assert mine.is_banned("anna's")
    (tmp_path / "notice").write_bytes(b"\xff\xfe")
    (tmp_path / "trainer.pass").unlink()
    assert mine.is_banned("anna's") and mine.mine() == pass_of(), "what was known is not forgotten"


def test_a_notice_that_could_not_be_read_once_is_read_at_the_next_look(tmp_path: Path) -> None:
    mine, (soft, hard) = Admission(RUN, tmp_path / "trainer.key"), resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "notice").write_text(notice(1, peers="mallory's"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # too many open files
    try:
        assert not mine.is_banned("mallory's")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert mine.is_banned("mallory's")


def told(key_file: Path, text: str) -> None:
    assert Admission(RUN, key_file).hear(text)


def test_what_one_process_hears_the_others_of_the_peer_know(tmp_path: Path) -> None:
    key_file = tmp_path / "trainer.key"
    here = Admission(RUN, key_file)
    (tmp_path / "notice").write_text(notice(1))
    assert not here.is_banned("mallory's")
    process = multiprocessing.get_context("fork").Process(target=told, args=(key_file, notice(2, peers="mallory's")))
    process.start()
    process.join()
    assert process.exitcode == 0 and here.is_banned("mallory's")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notice", "trainer.notice"]
    assert Admission(RUN, key_file).is_banned("mallory's"), "and after a restart"

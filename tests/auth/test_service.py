"""The authority's rules, with a clock that the test sets: time, possession, renewal, bans, keys, loss and recovery."""

from __future__ import annotations

import itertools
import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from auth.peers import START, Clock, Peer, closed_run, made_authority
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tt_cli.auth.authority import authority_folder, authority_server, issuer, member_store
from tt_cli.auth.authority.authority_backup import back_up, restore
from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority.issuer import Authority, RequestRefused
from tt_cli.auth.authority.member_store import MemberStore
from tt_cli.auth.authority.organiser import Organiser
from tt_cli.auth.authority_requests import AccuseRequest, JoinRequest
from tt_cli.database import DatabaseDown
from tt_cli.errors import TTError, UsageError
from tt_cli.identity.passes import InvalidPass, begin_of, encode, read_notice, read_pass

HOUR = 3600.0
EXAMPLES = itertools.count()
HUB_PROOF = {"proof": {"way": "hub", "user": "ada"}}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(clock: Clock) -> Iterator[Authority]:
    with closing((one := made_authority(clock)).store):
        yield one


def refused(status: int, words: str, action: Callable[[], object]) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        action()
    assert caught.value.status == status
    assert "\n" not in str(caught.value)


def test_a_pass_is_renewed_again_and_again(authority: Authority, clock: Clock) -> None:
    peer = Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    for _ in range(5):
        clock.now += HOUR / 2
        text = peer.renewal(authority, text)
        found = read_pass(text, authority.folder.settings().line(), authority.run.identity, clock.now)
        assert (found.user, found.peer_id, found.issued, found.expires) == (
            "ada",
            peer.peer_id,
            clock.now,
            clock.now + HOUR,
        )


def test_renewing_takes_the_peers_own_key(authority: Authority) -> None:
    peer, thief = Peer(), Peer(1)
    text = authority.issue_here(peer.peer_id, "ada")
    refused(401, "belongs to another peer", lambda: thief.renewal(authority, text))
    made = authority.challenge(peer.peer_id, "renew")
    forged = thief.renew_request(made, authority.run, text).model_copy(update={"key": encode(peer.public)})
    refused(401, "signature is not", lambda: authority.renew(forged))
    other_run = peer.renew_request(made, authority.run.replaced({"run.name": "other"}), text)
    refused(401, "signature is not", lambda: authority.renew(other_run))
    refused(401, "no pass of this authority|malformed", lambda: peer.renewal(authority, "nonsense"))
    authority.issue_here(peer.peer_id, "ben")
    refused(401, "older one, of another user", lambda: peer.renewal(authority, text))


def test_a_nonce_counts_once_for_one_peer_and_purpose(authority: Authority, clock: Clock) -> None:
    peer = Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    made = authority.challenge(peer.peer_id, "renew")
    request = peer.renew_request(made, authority.run, text)
    assert authority.renew(request)
    clock.now += 1
    assert peer.renewal(authority, text)
    refused(401, "used already", lambda: authority.renew(request))
    for other in (authority.challenge(Peer(1).peer_id, "renew"), authority.challenge(peer.peer_id, "join")):
        wrong = peer.renew_request(other, authority.run, text)
        refused(401, "nonce is not one", lambda wrong=wrong: authority.renew(wrong))
    late = peer.renew_request(authority.challenge(peer.peer_id, "renew"), authority.run, text)
    clock.now += issuer.NONCE_SECONDS
    refused(401, "too old", lambda: authority.renew(late))
    clock.now += 1
    assert peer.renewal(authority, text)
    with authority.store._transaction() as connection:
        assert len(connection.execute(sa.select(member_store.used)).all()) == 1, "the others can be used no more"


def test_an_expired_pass_is_renewed_and_accuses_nobody(authority: Authority, clock: Clock) -> None:
    peer = Peer()
    said = {"pass": authority.issue_here(peer.peer_id, "ada"), "proof": "0" * 64}

    def request() -> AccuseRequest:
        made = authority.challenge(peer.peer_id, "accuse")
        return AccuseRequest(**peer.body("accuse", vars(made), authority.run.identity, said))

    assert authority.hear(first := request())
    refused(401, "used already", lambda: authority.hear(first))
    clock.now += HOUR
    refused(401, "has expired", lambda: authority.hear(request()))
    assert peer.renewal(authority, said["pass"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_any_changed_nonce_is_refused(authority: Authority, data: st.DataObject) -> None:
    peer = Peer()
    nonce = authority.challenge(peer.peer_id, "renew").nonce
    at = data.draw(st.integers(0, len(nonce) - 1))
    other = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=. é"))
    changed = nonce[:at] + other + nonce[at + 1 :]
    if changed != nonce:
        with pytest.raises(RequestRefused, match="the nonce is not one"):
            authority._unseal("nonce", changed, f"renew {peer.peer_id}")
    assert authority._unseal("nonce", nonce, f"renew {peer.peer_id}")[1].text == authority._key().text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(jumps=st.lists(st.floats(-3 * HOUR, 3 * HOUR), min_size=1, max_size=6))
def test_a_pass_never_lives_longer_than_it_should(authority: Authority, clock: Clock, jumps: list[float]) -> None:
    """Whatever the authority's clock does: a pass is good for an hour of that clock, and is renewed at most then."""
    peer, key, run = Peer(2), authority.folder.settings().line(), authority.run.identity
    clock.now = START
    text = authority.issue_here(peer.peer_id, f"eve{next(EXAMPLES)}")  # each may renew some hundred times
    for jump in jumps:
        clock.now += jump
        held = read_pass(text, key, run, clock.now, leeway=10 * issuer.GRACE_SECONDS)
        try:
            text = peer.renewal(authority, text)
        except RequestRefused as error:
            assert error.status == 401
            assert held.expires + issuer.GRACE_SECONDS <= clock.now or held.issued > clock.now
            continue
        renewed = read_pass(text, key, run, clock.now)
        assert renewed.expires - renewed.issued == HOUR
        assert abs(renewed.issued - clock.now) < 1e-6


def test_who_proved_it_long_ago_proves_it_again(authority: Authority, clock: Clock) -> None:
    peer = Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    while clock.now < START + issuer.PROOF_SECONDS:
        clock.now += issuer.GRACE_SECONDS  # away for a week less an hour's pass
        text = peer.renewal(authority, text)
    clock.now += 1
    refused(401, "more than 14 days ago", lambda: peer.renewal(authority, text))
    text = authority.issue_here(peer.peer_id, "ada")  # after a long absence it is joining again
    clock.now += HOUR + issuer.GRACE_SECONDS
    refused(401, "expired", lambda: peer.renewal(authority, text))


def test_a_ban_takes_effect_at_once_and_reaches_the_notice(
    authority: Authority, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer, "NOTICE_SECONDS", -1.0)  # they are over
    ada, bob = Peer(), Peer(1)
    texts = {peer: authority.issue_here(peer.peer_id, user) for peer, user in ((ada, "Ada"), (bob, "bob"))}
    before, _ = authority.notice()
    with Organiser.at_work(authority.run) as organiser:
        organiser.ban("user", "aDa", "poison")
        organiser.ban("peer", bob.peer_id, "")
    for peer, text in texts.items():
        refused(403, "is banned from this run", lambda p=peer, t=text: p.renewal(authority, t))
    number, text = authority.notice()
    key = authority.folder.settings().line()
    notice = read_notice(text, key, authority.run.identity, 4e9)
    assert number == notice.number > before
    assert set(notice.banned_users) == {"ada"} and set(notice.banned_peers) == {bob.peer_id}
    with Organiser.at_work(authority.run) as organiser:
        organiser.unban("user", "Ada")
        with pytest.raises(UsageError, match="user ada is not banned"):
            organiser.unban("user", "ada")
        assert [one["name"] for one in organiser.store.bans()] == [bob.peer_id]
    assert authority.notice()[0] > number, "peers take a later notice alone"
    assert ada.renewal(authority, texts[ada])


def test_orders_are_numbered_and_read_by_peers(authority: Authority) -> None:
    with Organiser.at_work(authority.run) as organiser:
        organiser.pause("the  data set\nis broken")
        first = organiser.roll_back(1200, "3f8a" * 16, "acme/checkpoints")
        second = organiser.roll_back(1100, "77aa" * 16, "/mnt/shared/step-00001100.safetensors")
        for wrong in ((-1, "a" * 64, "b"), (1, "", "b"), (1, "a" * 300, "b"), (1, "3f8a…", "b"), (2**63, "a" * 64, "")):
            with pytest.raises(UsageError, match="name a checkpoint"):
                organiser.roll_back(*wrong)
        for place in ("acme", "https://huggingface.co/acme/checkpoints", "acme/check\npoints", f"acme/{'a' * 500}"):
            with pytest.raises(UsageError, match="no member finds a checkpoint at '"):
                organiser.roll_back(1100, "77aa" * 16, place)
        with pytest.raises(UsageError, match="no user's name"):
            organiser.ban("user", "a b", "")
    notice = read_notice(authority.notice()[1], authority.folder.settings().line(), authority.run.identity, 4e9)
    assert notice.paused == "the data set is broken"
    assert second > first and notice.rollback is not None
    assert (notice.rollback.step, notice.rollback.order) == (1100, second)
    authority._notice = None
    with Organiser.at_work(authority.run) as organiser:
        organiser.resume()
        assert [entry["what"] for entry in organiser.store.trail(10)] == ["pause", "rollback", "rollback", "resume"]
    later = read_notice(authority.notice()[1], authority.folder.settings().line(), authority.run.identity, 4e9)
    assert later.paused == "" and later.number > notice.number and later.rollback == notice.rollback


def test_no_stranger_pushes_out_of_the_audit_what_the_organiser_did_or_who_joined(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_store, "MOST_AUDITED", 3)
    monkeypatch.setattr(member_store, "_PRUNE_EVERY", 1)
    with Organiser.at_work(authority.run) as organiser:
        organiser.ban("user", "mallory", "poison")
        organiser.unban("user", "mallory")
    authority.store.write_down(START, "ada", "joined", "", "hub")
    for number in range(5):
        authority.store.write_down(START + number, "organiser", "not proven", "", str(number))
    kept = [(entry["what"], entry["detail"]) for entry in authority.store.trail(10)]
    assert kept == [
        ("ban", "user mallory poison"),
        ("unban", "user mallory"),
        ("joined", "hub"),
        *(("not proven", each) for each in "234"),
    ]
    assert [entry["what"] for entry in authority.store.trail(4)] == ["unban", "joined", "not proven", "not proven"]
    assert [entry["what"] for entry in authority.store.trail(1)] == ["joined"]


def test_one_user_has_so_many_peers(authority: Authority, clock: Clock) -> None:
    authority.most_peers = 2
    for number in (0, 1):
        authority.issue_here(Peer(number).peer_id, "ada")
    refused(403, "ada has 2 peers in this run already", lambda: authority.issue_here(Peer(2).peer_id, "ada"))
    assert authority.issue_here(Peer(1).peer_id, "ada")
    assert authority.issue_here(Peer(2).peer_id, "bob")
    clock.now += HOUR
    assert authority.issue_here(Peer(3).peer_id, "ada")


def test_of_many_at_the_same_time_one_gets_the_nonce(authority: Authority) -> None:
    peer = Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    store = authority_server.open_store(authority.folder)
    second = Authority(authority.run, AuthorityFolder(authority.run), store, clock=authority.clock)
    made = authority.challenge(peer.peer_id, "renew")
    request = peer.renew_request(made, authority.run, text)
    answers: list[str] = []
    gate = threading.Barrier(12, timeout=240)

    def ask(one: Authority) -> None:
        gate.wait()
        try:
            answers.append(one.renew(request).text)
        except RequestRefused as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, args=((authority, second)[number % 2],)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert sorted(answers)[:11] == ["the nonce has been used already"] * 11
    assert answers and sorted(answers)[11].startswith("tt-pass-1.")


def test_an_open_run_needs_no_pass(clock: Clock) -> None:
    run, peer = closed_run().replaced({"membership.kind": "open", "membership.organisation": None}), Peer()
    open_one = made_authority(clock, run=run)
    body = peer.body("join", vars(open_one.challenge(peer.peer_id, "join")), run.identity, HUB_PROOF)
    refused(403, "is open: it needs no pass", lambda: open_one.join(JoinRequest(**body)))
    assert open_one.facts().ways == []
    assert open_one.notice()[1].startswith("tt-notice-1.")
    open_one.store.close()


# ---------------------------------------------------------------- keys


def test_the_key_changes_without_anybody_falling_out(
    authority: Authority, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = authority.folder.settings().line()
    run, peer = authority.run.identity, Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    line = authority.folder.rotate(clock.now, "2027-02-01").line()
    assert line.endswith(f" {old} until 2027-02-01") and line.count("ed25519:") == 2
    clock.now += 60
    text = peer.renewal(authority, text)  # the old key still signs
    for key in (old, line):
        assert read_pass(text, key, run, clock.now)
    with pytest.raises(UsageError, match="the key changes already, until 2027-02-01"):
        authority.folder.rotate(clock.now, "2027-03-01")
    ends = begin_of("2027-02-01")
    clock.now = ends - authority_folder.EARLY - HOUR
    text = authority.issue_here(peer.peer_id, "ada")
    clock.now = ends - authority_folder.EARLY + 1
    text = peer.renewal(authority, text)  # the new one signs, and peers with the new run file take both
    assert read_pass(text, line, run, clock.now)
    assert read_notice(authority.notice()[1], line, run, 4e9)
    with pytest.raises(InvalidPass, match="forged"):
        read_pass(text, old, run, clock.now)
    clock.now = ends + 1
    text = peer.renewal(authority, text)
    assert read_pass(text, line.split()[0], run, clock.now)


def test_a_leaked_key_ends_at_once(authority: Authority, clock: Clock) -> None:
    peer = Peer()
    text = authority.issue_here(peer.peer_id, "ada")
    old = authority.folder.settings().line()
    fresh = authority.folder.rotate(clock.now, None).line()
    assert fresh != old and "until" not in fresh
    refused(401, "forged pass", lambda: peer.renewal(authority, text))
    assert read_pass(authority.issue_here(peer.peer_id, "ada"), fresh, authority.run.identity, clock.now)


@pytest.mark.parametrize(("until", "words"), [("soon", "write a day"), ("2020-01-01", "less than two hours")])
def test_a_day_that_is_none_is_refused(authority: Authority, clock: Clock, until: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        authority.folder.rotate(clock.now, until)


def test_its_files_are_its_owners_alone(authority: Authority) -> None:
    folder = authority.folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with pytest.raises(UsageError, match="has its key already"):
        authority_server.found(authority.run)


# ---------------------------------------------------------------- loss and recovery


def test_a_lost_database_is_noticed_and_comes_back(authority: Authority, clock: Clock, tmp_path: Path) -> None:
    run, ada, bob = authority.run, Peer(), Peer(1)
    text = authority.issue_here(ada.peer_id, "ada")
    with Organiser.at_work(run) as organiser:
        organiser.ban("user", "mallory", "poison")
    before, _ = authority.notice()
    file = tmp_path / "backup.json"
    back_up(run, file, clock.now)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="exists: choose another name, or --force"):
        back_up(run, file, clock.now)
    later = authority.issue_here(bob.peer_id, "bob")  # not in the backup
    with Organiser.at_work(run) as organiser:  # nor are these, which have numbers
        organiser.pause("soon back")
        organiser.resume()
    before += 2
    authority.store.close()
    for path in authority.folder.path.glob("authority.db*"):
        path.unlink()

    with pytest.raises(TTError, match="its database is empty: restore it with `tt authority restore`"):
        authority_server.open_authority(run)
    restore(run, file, max(clock.now, time.time() + 60))
    assert {stat.S_IMODE(path.stat().st_mode) for path in authority.folder.path.glob("authority.db*")} == {0o600}
    again = Authority(run, AuthorityFolder(run), authority_server.open_store(AuthorityFolder(run)), clock=clock)
    assert ada.renewal(again, text)
    clock.now += HOUR / 2
    assert bob.renewal(again, later)  # his own pass proves it, as of when it was issued
    restored = again.store.member(bob.peer_id)
    assert restored is not None and restored.proven == clock.now - HOUR / 2
    refused(403, "user Mallory is banned", lambda: again.issue_here(Peer(2).peer_id, "Mallory"))
    number, signed = again.notice()
    assert number > before
    assert read_notice(signed, again.folder.settings().line(), run.identity, 4e9).banned_users == {"mallory"}
    with pytest.raises(UsageError, match="would be replaced; say --force"):
        restore(run, file, clock.now)
    again.store.close()


def test_lost_keys_come_back_too_and_newer_ones_stay(authority: Authority, clock: Clock, tmp_path: Path) -> None:
    run, file = authority.run, tmp_path / "backup.json"
    back_up(run, file, clock.now)
    line = authority.folder.settings().line()
    authority.store.close()
    for path in authority.folder.path.iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="there is no authority in"):
        AuthorityFolder(run).settings()
    restore(run, file, clock.now)
    folder = AuthorityFolder(run)
    assert folder.settings().line() == line
    newer = folder.rotate(clock.now, "2027-05-01").line()
    (folder.path / "authority.db").unlink()
    restore(run, file, clock.now)
    assert AuthorityFolder(run).settings().line() == newer


def test_what_is_no_backup_is_one_line(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "backup.json"
    good = tmp_path / "good.json"
    back_up(authority.run, good, START)
    content, line = json.loads(good.read_text()), authority.folder.rotate(START, "2027-05-01").line()
    for text in ("", "[]", "{}", json.dumps({**content, "tables": {}}), json.dumps({**content, "settings": 3})):
        file.write_text(text)
        with pytest.raises(UsageError, match="is no backup|is damaged") as caught:
            restore(authority.run, file, START, force=True)
        assert "\n" not in str(caught.value)
    file.write_text(json.dumps({**content, "run": "other-1"}))
    with pytest.raises(UsageError, match="a backup of run other-1"):
        restore(authority.run, file, START, force=True)
    assert authority.store.founded
    assert authority.folder.settings().line() == line  # newer keys than the backup's
    assert authority.issue_here(Peer().peer_id, "ada")


def test_a_damaged_file_of_keys_is_one_line(authority: Authority) -> None:
    authority.folder.file.write_text('{"format": "tt-authority-1"')
    with pytest.raises(TTError, match="cannot be read .*: give `tt authority restore` --force$"):
        AuthorityFolder(authority.run).settings()


def test_a_database_that_is_gone_is_said(tmp_path: Path) -> None:
    store = MemberStore(f"sqlite:///{tmp_path}/missing/a.db")
    with pytest.raises(DatabaseDown, match="the authority's database does not answer"):
        store.member("x")
    for url, words in (
        ("nonsense", "--database:"),
        ("mysql://a/b", "--database:"),
        ("unheard://a/b", "--database:"),
        ("postgresql://u:secret@127.0.0.1:9/x", ""),
    ):
        try:
            MemberStore(url).founded  # noqa: B018 - it asks the database
        except (UsageError, DatabaseDown) as error:
            assert words in str(error) and "\n" not in str(error) and "secret" not in str(error)

"""The supervisor's side: passes are renewed, bans and orders arrive, and what goes wrong is said once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from auth.peers import Clock, closed_run, pointed
from auth.running import LIFE, Running, begun, key_file
from told import MOST, Told

from tt_cli.auth import pass_renewer as room
from tt_cli.auth.authority import http_api, issuer
from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority.http_api import Limits
from tt_cli.auth.authority.organiser import Organiser
from tt_cli.auth.authority_client import AuthorityClient, AuthorityUnreachable
from tt_cli.auth.authority_requests import PassRefused
from tt_cli.auth.identities import free_identity
from tt_cli.auth.pass_renewer import OnThisHost, PassRenewer
from tt_cli.auth.peer_admission import UNGUARDED, admission, is_here
from tt_cli.errors import TTError, UsageError
from tt_cli.identity.passes import Pass, read_notice, read_pass
from tt_cli.identity.rate_limit import RateLimit
from tt_cli.run import folders
from tt_cli.run.initial_peers import peers_met
from tt_cli.supervisor.peer_state import read_status
from tt_cli.supervisor.slot import AUX, TRAINER, claim_slot, identity_name
from tt_cli.swarm.membership.rsa_identity import claim_identity

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(room, "FIRST_WAITS", (0.05, 0.05))
    monkeypatch.setattr(room, "NEARLY_OVER", 0.2)
    monkeypatch.setattr(issuer, "NOTICE_SECONDS", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def running() -> Iterator[Running]:
    with Running() as one:
        yield one


@pytest.fixture
def told() -> Told:
    return Told()


def asking(running: Running, told: Told) -> PassRenewer:
    """One that has nothing from before."""
    client = AuthorityClient(running.run, key_file(running.run), told)
    return PassRenewer(running.run, key_file(running.run), client, told)


def pass_now(running: Running) -> tuple[str, float]:
    text = key_file(running.run).with_suffix(".pass").read_text().strip()
    found = read_pass(text, running.key, running.run.identity, time.time(), leeway=1e6)
    return found.user, found.expires


def wait_for(condition: Callable[[], bool]) -> None:
    """For what no event tells: a file that another thread replaces."""
    deadline = time.monotonic() + MOST
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def notice_number(running: Running) -> int:
    text = key_file(running.run).with_name("notice").read_text().strip()
    return read_notice(text, running.key, running.run.identity, 4e9).number


def test_a_pass_is_renewed_before_it_ends(running: Running, told: Told) -> None:
    with begun(running, told) as keeper:
        assert keeper.user == "ada"
        expired = [pass_now(running)[1]]
        for _ in range(3):
            wait_for(lambda: pass_now(running)[1] > expired[-1])
            user, expires = pass_now(running)
            assert user == "ada"
            assert expires - expired[-1] >= LIFE / 2 - 0.01  # at half of its life, not all the time
            expired.append(expires)
        folder = folders.run_folder(running.run)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_file()}
        assert modes == {"trainer.key": 0o600, "trainer.pass": 0o600, "notice": 0o600}
    assert told.lines == []
    before = pass_now(running)
    threading.Event().wait(LIFE)
    assert pass_now(running) == before  # nobody renews any more


def test_a_pass_that_ran_out_while_the_machine_slept_is_renewed_when_it_wakes(told: Told) -> None:
    """The clock that counts for waiting stands still meanwhile, for half of a pass's life."""
    slept, looked = 300.0, threading.Event()  # the pass is old enough for a look at where the peer is

    def where() -> list[str]:
        looked.set()
        return []

    with Running(life=3600.0) as running:
        keeper = begun(running, told, addresses=where, clock=lambda: time.time() + slept)
        _, expires = pass_now(running)
        with keeper:
            assert looked.wait(MOST) and pass_now(running)[1] == expires, "it waits"
            slept = 1900.0
            wait_for(lambda: pass_now(running)[1] > expires)
    assert told.lines == []


def test_peers_tell_the_authority_where_they_are_and_hear_of_the_others(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who accepts no connections any more is named to nobody. An authority is told once it has named somebody."""
    monkeypatch.setattr(room, "NEARLY_OVER", 7200.0)  # passes of before are renewed at once, and last longer than this
    ada_at, bob_at = list[str](), list[str]()

    def later() -> float:
        return time.time() + 300.0  # a pass is old enough for a look at where its peer is

    with Running(life=3600.0) as running:
        folder = folders.run_folder(running.run)
        ada = begun(running, told, addresses=lambda: ada_at, clock=later)
        bob = begun(running, told, "bob", addresses=lambda: bob_at, clock=later)
        assert not ada._source.lacks(["anywhere"]), "it may be one of before"
        with ada:
            where = f"/ip4/203.0.113.7/tcp/31337/p2p/{ada._source.peer_id}"
            ada_at[:] = ["/dns4/ä/tcp/1/p2p/" + ada._source.peer_id, "/" + "a" * 300, where]
            wait_for(lambda: ada._source._told == [where])
            with bob:
                assert peers_met(folder) == bob._source.members == [where] and ada._source.members == []
                ada_at.clear()
                wait_for(lambda: ada._source._told == [])
                bob_at.append("/ip4/203.0.113.8/tcp/31337")  # nobody's, and a reason to ask again
                wait_for(lambda: bob._source.members == [])
                assert peers_met(folder) == [where], "they may be there again"
    assert told.lines == []


@pytest.mark.parametrize("kind", ["user", "peer"])
def test_a_ban_ends_it_within_a_poll(running: Running, told: Told, kind: str) -> None:
    with begun(running, told) as keeper:
        name = "ADA" if kind == "user" else keeper._source.peer_id
        with Organiser.at_work(running.run) as organiser:
            organiser.ban(kind, name, "poison")
        told.wait("the worker is asked to leave")
        assert "is banned from this run" in keeper.refusal and "\n" not in keeper.refusal
        assert not key_file(running.run).with_suffix(".pass").exists()
    with pytest.raises(PassRefused):
        asking(running, told).__enter__()


def test_an_authority_that_is_down_is_said_once_and_outlived(told: Told) -> None:
    running, ahead = Running(life=3600.0), 0.0
    with begun(running, told, clock=lambda: time.time() + ahead):
        running.end()
        told.wait("no news of bans and orders")
        _, expires = pass_now(running)
        ahead = 1900.0  # more than half of its life
        line = told.wait("the pass is not renewed: the authority at http://127.0.0.1:")
        assert line.endswith("it counts for 28 min more, trying again")
        ahead = 3700.0  # it has run out
        told.wait("the pass is not renewed", 2)
        with Running(running.port, life=7200.0):
            told.wait("the pass is renewed")
            told.wait("the authority answers again")
            assert pass_now(running)[1] > expires
            assert len(told.found("no news of bans and orders")) == 1
            assert len(told.found("the pass is not renewed")) == 2  # once, and once more when it had ended
    assert not told.found("asked to leave")


def test_without_a_pass_and_without_an_authority_it_is_one_line(running: Running, told: Told) -> None:
    running.end()
    with pytest.raises(TTError, match="cannot be reached .*; no pass, no entry: try again later") as caught:
        asking(running, told).__enter__()
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert told.levels == ["warning", "warning"]


def test_a_signal_before_there_is_a_worker_ends_it_as_ctrl_c_does(running: Running, tmp_path: Path) -> None:
    running.end()
    run, file = running.run.replaced({"membership.oauth_client_id": "app"}), tmp_path / "run.toml"
    file.write_text(run.to_toml())
    command = [sys.executable, "-m", "tt_cli.cli.main", "join", str(file), "--new-swarm", "--plain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while "trying again in" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        process.terminate()
        assert process.wait(MOST) == 130
    status = read_status(folders.run_folder(run) / "peer.json")
    assert status is not None and (status.state, status.reason) == ("ended", "left: SIGTERM")


def test_who_is_one_too_many_at_an_address_waits_for_its_turn(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a class whose machines all begin behind one router."""
    clock = Clock()
    proving = RateLimit(burst=1.0, per_second=1.0, clock=clock)
    monkeypatch.setattr(http_api, "Limits", lambda: Limits(proving=proving))

    def tell(line: str, level: str) -> None:
        told(line, level)
        clock.now += 1.0

    with Running() as running:
        assert proving.wait("127.0.0.1") == 0.0, "somebody else was first"
        client = AuthorityClient(running.run, key_file(running.run), tell)
        with pytest.raises(PassRefused, match="nobody is logged in here"):  # which is asked in the second try
            PassRenewer(running.run, key_file(running.run), client, tell).__enter__()
    assert "is asked too often from here: asked too often: wait 1 s; trying again in" in told.lines[0]
    assert len(told.lines) == 1


def test_orders_are_told_and_the_notice_only_gets_newer(running: Running, told: Told) -> None:
    with begun(running, told) as keeper:
        with Organiser.at_work(running.run) as organiser:
            organiser.pause("the data set is broken")
            told.wait("the organiser has paused the run: the data set is broken")
            organiser.roll_back(1200, "3f8a" * 16, "acme/checkpoints")
            told.wait("the organiser takes the run back to step 1200")
            organiser.resume()
            told.wait("the organiser lets the run go on")
        file = key_file(running.run).with_name("notice")
        number = notice_number(running)
        old = file.read_text()
        with Organiser.at_work(running.run) as organiser:
            organiser.ban("user", "mallory", "")
        wait_for(lambda: notice_number(running) > number)
        newest = notice_number(running)
        file.write_text(old)  # somebody puts an older one back
        with Organiser.at_work(running.run) as organiser:
            organiser.ban("user", "eve", "")
        wait_for(lambda: notice_number(running) > newest and keeper._notice.number > newest)  # the file is first
        keeper._hear(old.strip(), stored=True)  # as where the authority does not answer
        assert keeper._notice.number > newest


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, b'{"status": "ok"}', "does not answer as an authority does"),
        (403, b"<h1>403 Forbidden</h1>", "cannot decide now: it answered 403"),
        (502, b"<h1>502 Bad Gateway</h1>", "cannot decide now: it answered 502"),
    ],
)
def test_what_answers_in_another_form_is_asked_again(
    status: int, answer: bytes, words: str, running: Running, told: Told
) -> None:
    """As a proxy does that leads elsewhere for a while, or refuses by itself: nobody loses a pass by that."""

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere:
        threading.Thread(target=elsewhere.serve_forever).start()
        run = pointed(running.run, f"http://127.0.0.1:{elsewhere.server_port}", running.key)
        with closing(AuthorityClient(run, key_file(running.run), told)) as client:
            for ask in (lambda: client.admission("held"), lambda: client.accuse(b"proof", "held")):
                with pytest.raises(AuthorityUnreachable, match=words):
                    ask()
        elsewhere.shutdown()


def test_a_notice_that_is_not_signed_is_said(running: Running, told: Told) -> None:
    other = "ed25519:" + "A" * 43
    run = pointed(closed_run(), running.url, other)
    run = run.replaced({"membership.kind": "open", "membership.organisation": None})
    with begun(running, told, run=run):
        told.wait("the authority's notice does not count (forged notice")
        assert not key_file(run).with_name("notice").exists()


def test_an_open_run_has_bans_and_orders_and_no_pass(running: Running, told: Told) -> None:
    run = running.run.replaced({"membership.kind": "open", "membership.organisation": None})
    with begun(running, told, run=run) as keeper:
        assert keeper.user == ""
        with Organiser.at_work(running.run) as organiser:
            organiser.ban("user", "anybody", "")
            organiser.ban("peer", keeper._source.peer_id, "")
        told.wait("the worker is asked to leave")
    with pytest.raises(PassRefused, match="is banned from this run"):
        begun(running, told, run=run).__enter__()
    assert not list(folders.run_folder(run).glob("*.pass"))


def test_the_organisers_own_peer_needs_no_hub(running: Running, told: Told) -> None:
    aux = folders.run_folder(running.run) / "aux.key"
    with admission(running.run, "aux", told, here=True) as admitted:
        assert admitted.user == "organiser"
        text = aux.with_suffix(".pass").read_text().strip()
        assert read_pass(text, running.key, running.run.identity, time.time()).user == "organiser"
        with Organiser.at_work(running.run) as organiser:
            assert [one.way for one in organiser.store.members()] == ["organiser"]
    # An authority here whose key is not the run file's is another one.
    run = pointed(running.run, running.run.membership.authority or "", "ed25519:" + "A" * 43)
    assert is_here(running.run) and not is_here(run)
    source = OnThisHost(running.run, aux, "ada")
    text = source.notice(-1)
    assert text is not None
    assert source.notice(read_notice(text, running.key, running.run.identity, 4e9).number) is None
    source.close()


def test_a_run_without_an_authority_says_what_that_means(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="admits members of acme on the Hub only, and nobody is logged in"):
        admission(closed_run(), "trainer", told).__enter__()
    assert (told.lines, told.levels) == ([UNGUARDED], ["warning"])
    with admission(closed_run(), "aux", told, here=True) as admitted:
        assert admitted.user == ""
        admitted.check()
    run = closed_run().replaced({"membership.kind": "open", "membership.organisation": None})
    with pytest.raises(UsageError, match="--send-token: this run asks for no pass"):
        admission(run, "trainer", told, send_token=True).__enter__()
    assert not AuthorityFolder(run).exists


def test_a_full_disk_is_one_line(running: Running, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = begun(running, told)
    key_file(running.run).with_suffix(".pass").unlink()
    keeper._source = OnThisHost(running.run, key_file(running.run), "ada")

    def full(*arguments: object, **named: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(TTError, match="cannot write .*: No space left on device; free space"):
        keeper.__enter__()


def test_what_a_full_disk_did_not_take_is_asked_for_again(told: Told) -> None:
    """The pass and the notice; a folder in the place of its file stands for the disk."""
    with Running(life=3600.0) as running:
        running.authority.clock = lambda: time.time() - 3000.0  # a pass that is to be renewed at once
        keeper = begun(running, told)
        running.authority.clock = time.time
        files = [key_file(running.run).with_name(name) for name in ("trainer.pass", "notice")]
        files[1].mkdir()

        def where() -> list[str]:
            if files[0].is_file():  # which was read, and is written next
                files[0].unlink()
                files[0].mkdir()
            return []

        keeper._addresses = where
        with keeper:
            told.wait("no news of bans and orders: cannot write")
            told.wait("the pass is not renewed: cannot write")
            keeper._addresses = list
            for file in files:
                file.rmdir()
            wait_for(lambda: all(file.is_file() for file in files))
            told.wait("the pass is renewed")


def test_the_longer_a_pass_has_ended_the_rarer_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    held = Pass("ada", "Qm", "run", 0.0, 3600.0)
    left = [room._until_renewal(held, held.expires - seconds) for seconds in (1800.0 - 60.0, 30.0, 1.0)]
    assert left == [room.POLL_SECONDS, room.SHORTEST_TURN, 0.5]
    ended = [room._until_renewal(held, held.expires + seconds) for seconds in (1.0, 30.0, 3600.0)]
    assert ended == [0.5, room.SHORTEST_TURN, room.POLL_SECONDS]


def test_the_pass_is_that_of_the_key_which_the_worker_claims(running: Running, told: Told) -> None:
    """Two trainers on one machine: each supervisor's slot has a name of its own, and so have key and pass."""
    folder = folders.run_folder(running.run)
    slots = [claim_slot(folder, TRAINER), claim_slot(folder, TRAINER), claim_slot(folder, AUX)]
    assert [identity_name(slot) for slot in slots] == ["trainer", "trainer-2", "aux"]
    free = []
    kept = []  # a lock ends with its file
    for name in map(identity_name, slots):
        with admission(running.run, name, told, here=True):
            kept.append(claim_identity(folder, "trainer", name))
            text = (folder / f"{name}.pass").read_text().strip()
            assert read_pass(text, running.key, running.run.identity, time.time()).peer_id == kept[-1].peer_id
            free.append(free_identity(running.run, "trainer"))
    assert free == ["trainer-2", "trainer-3", "trainer-3"]
    for identity in kept:
        identity.lock.close()

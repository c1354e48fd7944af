"""Who are you: the three ways, with the real Hub client in real processes against the stand-in; what they refuse."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from auth.peers import Member, Peer, Served, closed_run, pointed
from hub_standin import HubStandin

from tt_cli.auth.authority_requests import PROOF_REPOSITORY, proof_content, proof_path
from tt_cli.identity.passes import read_pass
from tt_cli.run import RunConfig

pytestmark = pytest.mark.slow

SECRETS = ("hf_ada_write", "hf_ada_read", "hf_ada_login", "hf_mallory", "hf_fine", "refresh")
NO_KEY = "ed25519:" + "A" * 43


class Host:
    """The organiser's machine: an authority that takes all three ways, a server started for this module."""

    def __init__(self, hub: HubStandin, folder: Path):
        self.folder, self.run = folder, closed_run()
        self.file = folder / "host.toml"
        self.environment = {**hub.environment(folder / "home"), "TT_HOME": str(folder / "home" / "tt")}
        self.file.write_text(self.run.to_toml())
        init = [sys.executable, "-m", "tt_cli.cli.main", "authority", "init", str(self.file)]
        subprocess.run(init, env={**os.environ, **self.environment}, capture_output=True, check=True)
        self.file.write_text(pointed(self.run, "http://127.0.0.1:1", NO_KEY, oauth_client_id="app-1").to_toml())
        self.server = Served(self.file, self.environment)

    def kept(self) -> str:
        """All that the authority has on its disk, as text."""
        files = [path for path in (self.folder / "home").rglob("*") if path.is_file()]
        assert files
        return "".join(path.read_bytes().decode("latin-1") for path in files)


@pytest.fixture(scope="module")
def host(_hub_process: HubStandin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    one = Host(_hub_process, tmp_path_factory.mktemp("host"))
    yield one
    output = one.server.end()
    for secret in SECRETS:  # of all the tests here
        assert secret not in output and secret not in one.kept()


class World:
    """The Hub's users, and what volunteers have: the run file and homes of their own."""

    def __init__(self, hub: HubStandin, host: Host, folder: Path):
        self.hub, self.host, self.folder, self.run = hub, host, folder, host.run
        hub.add_user("hf_ada_write", "Ada", organisations={"acme": "read"}, role="write")
        hub.add_user("hf_ada_read", "Ada", organisations={"acme": "read"})
        hub.add_user("hf_ada_login", "Ada", organisations={"acme": "read"}, role="oauth")
        for name in ("bob", "carol", "dave"):  # more than a page of members
            hub.add_user(f"hf_{name}", name, organisations={"acme": "read"})
        hub.add_user("hf_mallory", "mallory", organisations={"evil": "admin"}, role="write")
        hub.add_user("hf_fine", "Ada", organisations={"acme": "read"}, role="fineGrained")
        self.url, self.key = host.server.url, host.server.key
        self.file = folder / "run.toml"
        self.point()

    def point(self, url: str = "", key: str = "", **changes: Any) -> None:
        """Write the run file that volunteers get."""
        self.file.write_text(pointed(self.run, url or self.url, key or self.key, **changes).to_toml())

    def home(self, name: str, token: str = "") -> dict[str, str]:
        """Variables of a volunteer's processes."""
        home = self.folder / name
        environment = {**self.hub.environment(home), "TT_HOME": str(home / "tt")}
        return {**environment, "HF_TOKEN": token} if token else environment


@pytest.fixture
def world(hub: HubStandin, host: Host, tmp_path: Path) -> World:
    return World(hub, host, tmp_path)


def pass_of(world: World, one: Member) -> Any:
    admitted = one.until("admitted", "refused", "failed")
    assert admitted["kind"] == "admitted", one.lines
    run = RunConfig.from_toml(world.file.read_text(), "run")
    return read_pass(admitted["text"], run.membership.authority_key or "", run.identity, time.time())


def test_by_a_commit_in_ones_own_repository(world: World) -> None:
    with Member(world.file, world.home("ada", "hf_ada_write"), "--poll", "0.2") as one:
        found = pass_of(world, one)
        assert found.user == "Ada"
        folder = world.folder / "ada" / "tt" / "runs" / world.run.identity
        files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert files == {"trainer.key": 0o600, "trainer.pass": 0o600, "notice": 0o600}
        assert one.end() == 0
    asked = world.hub.log()
    proof = f"/Ada/{PROOF_REPOSITORY}/resolve/"
    assert any(line.startswith(f"GET {proof}") and found.peer_id in line for line in asked)
    assert sum("/api/organizations/acme/members" in line for line in asked) == 2  # pages
    with Member(world.file, world.home("ada", "hf_ada_write"), "--poll", "0.2") as again:
        assert pass_of(world, again) == found  # the pass of before does
        assert again.end() == 0


def test_by_a_login_on_the_hubs_page(world: World, hub: HubStandin) -> None:
    world.point(oauth_client_id="app-1")
    with Member(world.file, world.home("ada")) as one:
        said = one.until("said", "refused", "failed")
        assert said["words"] == f"To take part, open {hub.url}/device in any browser and enter the code: CODE-0001"
        hub.decide("CODE-0001", "approve:hf_ada_login")
        assert pass_of(world, one).user == "Ada"
        assert one.end() == 0
    with Member(world.file, world.home("mallory")) as one:
        one.until("said")
        hub.decide("CODE-0002", "approve:hf_mallory")  # whose organisation likes to be called acme
        assert one.until("refused")["words"] == (
            "the authority of run emoji refuses: mallory is no member of acme: ask the organisation to add you"
        )
    with Member(world.file, world.home("bob")) as one:
        one.until("said")
        hub.decide("CODE-0003", "access_denied")
        assert "the login did not come about: it was denied" in one.until("refused")["words"]
    with Member(world.file, world.home("carol")) as one:
        one.until("said")
        hub.fault("userinfo", times=2)  # the code is spent by then
        hub.decide("CODE-0004", "approve:hf_ada_login")
        assert pass_of(world, one).user == "Ada"
    assert hub.log().count("GET /oauth/userinfo") == 5


def test_by_sending_a_read_token_when_asked_to(world: World) -> None:
    with Member(world.file, world.home("ada", "hf_ada_read"), "--send-token") as one:
        assert pass_of(world, one).user == "Ada"
        assert one.end() == 0
    with Member(world.file, world.home("fine", "hf_fine"), "--send-token") as one:
        assert "your token may do more than read, so it stays here" in one.until("refused")["words"]


def test_the_authority_itself_refuses_tokens_that_may_write(world: World) -> None:
    peer = Peer()
    with httpx2.Client(base_url=world.url, trust_env=False) as http:
        for token, status in (("hf_ada_write", 401), ("hf_fine", 401), ("hf_ada_login", 401), ("hf_no", 401)):
            made = http.post("/v1/challenge", json={"peer_id": peer.peer_id}).json()
            body = peer.body("join", made, world.run.identity, {"proof": {"way": "token", "token": token}})
            answer = http.post("/v1/join", json=body)
            assert answer.status_code == status
            assert token not in answer.text


def test_a_token_does_not_leave_over_a_line_that_others_can_read(world: World) -> None:
    world.point(world.url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), allow_http=True)
    with Member(world.file, world.home("ada", "hf_ada_read"), "--send-token", "--poll", "0.2") as one:
        assert "address is not https, so others could read" in one.until("refused", "failed")["words"]


def test_nobody_else_can_prove_it(world: World) -> None:
    """A pull request in another's repository, another's proof, a private one, a moved one, a proof for another run."""
    hub, peer, run = world.hub, Peer(), world.run.identity

    def answer(
        user: str, *, change: dict[str, str] | None = None, aside: bool = False, wrong: bool = False
    ) -> tuple[int, str]:
        with httpx2.Client(base_url=world.url, trust_env=False) as http:
            made = http.post("/v1/challenge", json={"peer_id": peer.peer_id}).json()
            content = {**proof_content(run, made["key"], made["nonce"], peer.public), **(change or {})}
            files = {proof_path(run, peer.peer_id): "[]" if wrong else json.dumps(content)}
            if aside:
                hub.commit_aside(f"{user}/{PROOF_REPOSITORY}", files)
            elif change is not None or wrong:
                hub.put("model", f"{user}/{PROOF_REPOSITORY}", files)
            body = peer.body("join", made, run, {"proof": {"way": "hub", "user": user}})
            got = http.post("/v1/join", json=body)
            return got.status_code, got.text

    assert answer("bob", change={})[0] == 200  # the honest case
    hub.put("model", f"carol/{PROOF_REPOSITORY}", {"README.md": "mine"})
    status, words = answer("carol", aside=True)
    assert status == 401 and "does not show" in words
    for change in ({"nonce": "old"}, {"run": "other-1"}, {"authority": "ed25519:other"}, {"key": "0" * 64}, {"x": "y"}):
        status, words = answer("carol", change=change)
        assert status == 401 and "is for another run, authority, nonce or key" in words, change
    assert answer("carol", wrong=True)[0] == 401
    hub.move(f"dave/{PROOF_REPOSITORY}", f"bob/{PROOF_REPOSITORY}")  # dave was bob's name once
    status, words = answer("dave")
    assert status == 401 and "now belongs to somebody else" in words
    assert answer("nobody")[0] == 401
    hub.put("model", f"mallory/{PROOF_REPOSITORY}", {})
    status, words = answer("mallory", change={})
    assert status == 403 and "mallory is no member of acme" in words
    trail = world.host.kept()
    assert "not proven" in trail and "no member" in trail


def test_who_may_not_join_is_told_in_one_line(world: World) -> None:
    with Member(world.file, world.home("nobody")) as one:
        assert one.until("refused")["words"] == (
            "the run emoji admits members of acme on the Hub only, and nobody is logged in here: run `tt login`"
        )
        assert one.end() == 2
    with Member(world.file, world.home("reader", "hf_ada_read")) as one:
        words = one.until("refused")["words"]
        assert words.startswith("cannot put the proof that you are Ada into Ada/tt-proof on the Hub")
        assert "\n" not in words and "--send-token" in words
    with Member(world.file, world.home("mallory", "hf_mallory")) as one:
        assert "mallory is none" in one.until("refused")["words"]


def test_a_hub_that_fails_is_tried_again(world: World) -> None:
    world.hub.fault("/resolve/", times=2)
    with Member(world.file, world.home("ada", "hf_ada_write"), "--poll", "0.2") as one:
        said = one.until("said", "refused", "failed")
        assert "cannot decide now: the Hub answered 503; try again later; trying again in 0 s" in said["words"]
        assert pass_of(world, one).user == "Ada"
        assert one.end() == 0
    world.hub.fault("/resolve/", times=50)
    with Member(world.file, world.home("again", "hf_ada_write"), "--poll", "0.2") as one:
        assert "no pass, no entry: try again later" in one.until("failed", "admitted")["words"]
        assert one.end() == 1


def test_two_servers_of_one_authority_agree(world: World) -> None:
    """Many joins at once, to two processes over one database: every peer gets a pass, every nonce counts once."""
    peers = [Peer(number) for number in range(6)]
    serving = (world.host.file, world.host.environment)
    with Served(*serving) as first, Served(*serving) as second:  # none has asked these
        assert first.key == second.key == world.key
        with httpx2.Client(base_url=first.url, trust_env=False) as http:
            made = [
                http.post("/v1/challenge", json={"peer_id": peer.peer_id}).raise_for_status().json() for peer in peers
            ]
        proof = {"proof": {"way": "token", "token": "hf_ada_read"}}
        bodies = [peer.body("join", one, world.run.identity, proof) for peer, one in zip(peers, made, strict=True)]
        gate = threading.Barrier(len(peers) * 2, timeout=240)

        def ask(number: int, url: str) -> tuple[int, int]:
            with httpx2.Client(base_url=url, trust_env=False, timeout=240) as http:
                gate.wait()
                return number, http.post("/v1/join", json=bodies[number]).status_code

        with ThreadPoolExecutor(len(peers) * 2) as threads:
            asked = [threads.submit(ask, one, at.url) for one in range(len(peers)) for at in (first, second)]
            codes = [one.result() for one in asked]
    for number in range(len(peers)):
        assert sorted(code for one, code in codes if one == number) == [200, 401]


def test_a_clock_that_is_wrong_is_said(world: World) -> None:
    folder = world.folder / "late"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() - 95.0\n")
    environment = {**world.home("ada", "hf_ada_write"), "PYTHONPATH": str(folder)}
    with Member(world.file, environment, "--poll", "0.2") as one:
        words = one.until("failed", "admitted", "refused")["words"]
    assert "this machine's clock is 95 s behind the authority's" in words and "timedatectl" in words


def test_another_key_than_the_run_files_is_said(world: World) -> None:
    world.point(key=NO_KEY)
    with Member(world.file, world.home("ada", "hf_ada_write"), "--poll", "0.2") as one:
        assert "signs with another key than the run file names" in one.until("refused", "failed")["words"]


def test_an_authority_that_is_none_is_said(world: World) -> None:
    world.point(world.hub.url)
    with Member(world.file, world.home("ada", "hf_ada_write"), "--poll", "0.2") as one:
        assert one.until("failed", "refused")["words"].startswith(f"the authority at {world.hub.url} answered 4")

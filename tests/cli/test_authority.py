"""`tt authority` and `tt identity` as an organiser and a volunteer use them, and `tt join` where it is refused."""

from __future__ import annotations

import json
import stat
import subprocess
import time
from pathlib import Path

import pytest
from auth.peers import closed_run, pointed
from conftest import Tt
from end_to_end.conftest import one_line

from tt_cli.identity.passes import authority_keys
from tt_cli.identity.peer_key import made_key
from tt_cli.run import RunConfig, folders, load_run

pytestmark = pytest.mark.slow

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
NO_KEY = "ed25519:" + "A" * 43


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(closed_run().to_toml())
    return str(path)


def ok(answer: subprocess.CompletedProcess[str]) -> str:
    assert (answer.returncode, answer.stderr) == (0, "")
    return answer.stdout


def test_from_the_first_key_to_a_change_of_keys(
    here: Tt, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ok(here("authority", "init", file, "--url", "https://passes.example.org"))
    lines = said[said.index("authority = ") :].splitlines()
    path = Path(file)
    path.write_text(path.read_text().replace('organisation = "acme"', "\n".join(['organisation = "acme"', *lines])))
    run = load_run(file)
    assert run.membership.closed and run.membership.authority == "https://passes.example.org"
    assert "has its key already" in one_line(here("authority", "init", file), 2)

    assert ok(here("authority", "ban", file, "Mallory", "--reason", "poison")).startswith("Banned user Mallory.")
    assert ok(here("authority", "ban", file, "--peer", PEER)).startswith(f"Banned peer {PEER}.")
    bans = [json.loads(line) for line in ok(here("authority", "bans", file, "--json")).splitlines()]
    assert [(one["kind"], one["name"], one["reason"]) for one in bans] == [
        ("user", "mallory", "poison"),
        ("peer", PEER, ""),
    ]
    assert ok(here("authority", "unban", file, "mallory")) == "User mallory may join again.\n"
    assert ok(here("authority", "members", file)) == "None.\n"
    assert "pauses within a minute" in ok(here("authority", "pause", file, "no\ndisk"))
    assert "goes on" in ok(here("authority", "resume", file))
    missing = one_line(here("authority", "rollback", file, "12"), 2)
    assert "(there is none): name one of those, or DIGEST and --source" in missing
    digest = "3f8a" * 16
    words = ok(here("authority", "rollback", file, "12", digest, "--source", "acme/checkpoints"))
    assert "goes back to step 12" in words

    key = run.membership.authority_key or ""
    until = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 5 * 86400))
    line = ok(here("authority", "rotate", file, "--until", until)).split('"')[1]
    assert line.endswith(f" {key} until {until}") and len(authority_keys(line)) == 2
    trail = [json.loads(line) for line in ok(here("authority", "audit", file, "--json")).splitlines()]
    assert [one["what"] for one in trail] == ["ban", "ban", "unban", "pause", "resume", "rollback", "rotate"]
    assert set(trail[0]) == {"at", "who", "what", "peer_id", "detail"}
    assert len(ok(here("authority", "audit", file)).splitlines()) == len(trail)

    backup = tmp_path / "backup.json"
    ok(here("authority", "backup", file, str(backup)))
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    monkeypatch.setenv("TT_HOME", str(tmp_path / "elsewhere"))
    assert ok(here("authority", "restore", file, str(backup))).startswith("Restored as of ")
    assert PEER in ok(here("authority", "bans", file))
    assert here("authority", "restore", file, str(backup)).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["members"], "missing argument 'RUN'; see `tt authority members --help`"),
        (["unheard", "FILE"], "no such command 'unheard'; see `tt authority --help`"),
        (["bans", "FILE"], "there is no authority in"),
        (["backup", "FILE", "x.json"], "there is no authority in"),
        (["ban", "FILE"], "who? Give a USER, or one peer with --peer"),
        (["serve", "FILE", "--pass-minutes", "0"], "--pass-minutes: 0: should be greater than or equal to 1"),
        (["serve", "FILE", "--most-peers", "0"], "--most-peers: 0: should be greater than or equal to 1"),
        (["serve", "FILE", "--trusted-proxy", "localhost"], "--trusted-proxy: must be an IP address, such as"),
        (["serve", "FILE", "--trusted-proxy", "*"], "--trusted-proxy: must be an IP address"),
        (["audit", "FILE", "--last", "-1"], "--last: -1: should be greater than or equal to 1"),
        (["rotate", "FILE"], "which way? Give --until DAY, or --now"),
        (["init", "FILE", "--database", "mysql://x"], "--database:"),
    ],
)
def test_what_is_wrong_is_one_line(here: Tt, file: str, arguments: list[str], words: str) -> None:
    answer = here("authority", *[file if one == "FILE" else one for one in arguments])
    assert words in one_line(answer, 2)


def test_identities_go_to_another_machine(here: Tt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No identity of run emoji here yet" in ok(here("identity", "show", "emoji"))
    ok(here("authority", "init", "emoji"))  # its keys are none of a peer's
    assert json.loads(ok(here("identity", "show", "emoji", "--json"))) == {}
    assert "join it first" in one_line(here("identity", "export", "emoji", "mine.json"), 2)
    made_key(folders.run_folder(load_run("emoji")) / "trainer.key")
    shown = json.loads(ok(here("identity", "show", "emoji", "--json")))
    exported = str(tmp_path / "mine.json")
    assert shown["trainer"] in ok(here("identity", "export", "emoji", exported))
    monkeypatch.setenv("TT_HOME", str(tmp_path / "elsewhere"))
    assert shown["trainer"] in ok(here("identity", "import", "emoji", exported))
    assert json.loads(ok(here("identity", "show", "emoji", "--json"))) == shown


def member_file(run: RunConfig, path: Path, url: str) -> str:
    path.write_text(pointed(run, url, NO_KEY).to_toml())
    return str(path)


def test_joining_a_closed_run_without_a_login_is_one_line(here: Tt, tmp_path: Path) -> None:
    file = member_file(closed_run(), tmp_path / "closed.toml", "http://127.0.0.1:9")
    for command in (("join", file, "--new-swarm"), ("monitor", file, "--peer", "/ip4/127.0.0.1/tcp/9/p2p/" + PEER)):
        answer = here(*command)
        assert answer.returncode == 2, answer.stderr
        assert answer.stderr == (
            "tt: the run emoji admits members of acme on the Hub only, and nobody is logged in here: run `tt login`\n"
        )


def test_a_ban_that_nobody_would_hear_of_is_refused(here: Tt, file: str, tmp_path: Path) -> None:
    """In a wrong TT_HOME: no second authority is made for a run that names its own, and another one is not taken."""
    closed = member_file(closed_run(), tmp_path / "closed.toml", "http://127.0.0.1:9")
    for action in ("init",), ("serve",), ("bans",), ("ban", "mallory"):
        said = one_line(here("authority", action[0], closed, *action[1:]), 2)
        assert "there is no authority in" in said and "set TT_HOME to the folder `home` that `tt init` made" in said
    assert not list(tmp_path.rglob("authority.json"))
    ok(here("authority", "init", file))
    assert "has another key than the run file" in one_line(here("authority", "ban", closed, "mallory"), 2)
    assert ok(here("authority", "bans", file)) == "None.\n"


def test_what_is_no_whole_peer_id_is_not_banned(here: Tt, file: str) -> None:
    ok(here("authority", "init", file))
    for name in ("abc123", "Wjhx5N", "12D3KooWabc", PEER[:-1], "mallory"):
        said = one_line(here("authority", "ban", file, "--peer", name), 2)
        assert said == f"tt: '{name}' is no peer's whole id: `tt authority members RUN` lists them\n"
    assert ok(here("authority", "bans", file)) == "None.\n"


def test_an_authority_beside_an_aux_peer_is_the_run_files(here: Tt, file: str, tmp_path: Path) -> None:
    closed = member_file(closed_run(), tmp_path / "closed.toml", "http://127.0.0.1:9")
    for wrong, words in (
        (file, "the run file names none; `tt authority init"),
        (closed, "there is no authority in"),
    ):
        answer = here("aux-peer", wrong, "--authority", "--port", "0", "--plain")
        assert words in one_line(answer, 2)
    ok(here("authority", "init", file))
    answer = here("aux-peer", closed, "--authority", "--port", "0", "--plain")
    assert "has another key than the run file: set TT_HOME" in one_line(answer, 2)

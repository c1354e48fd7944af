"""The folder that `tt init` makes: whole or not at all, keys for their owner alone, nothing overwritten."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from testbed.spawned import python

from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority.authority_server import open_store
from tt_cli.auth.identities import identities
from tt_cli.errors import TTError, UsageError
from tt_cli.organise import recipe as room
from tt_cli.organise.questions import RunAnswers, answered
from tt_cli.organise.recipe import make, next_steps
from tt_cli.organise.server_files import OWNER
from tt_cli.run import folders, load_run

ROOT = Path(__file__).parents[2]
CLOSED = {
    "organisation": "acme",
    "authority": "https://passes.example.org",
    "address": "tt.example.org",
    "port": "4000",
}


def answers(**given: str) -> RunAnswers:
    return answered("mine", given, lambda question, default: default)


def test_keys_lie_where_the_aux_peer_looks_and_the_run_file_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(answers(**CLOSED), tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # and nothing in the person's own home
    run = load_run(str(tmp_path / "mine" / "run.toml"))
    assert run == made.run and run.membership.closed
    monkeypatch.setenv("TT_HOME", str(tmp_path / "mine" / "home"))
    assert identities(run) == {"aux": made.peer_id}
    assert run.peers.initial == [f"/dns4/tt.example.org/tcp/4000/p2p/{made.peer_id}"] == [made.address]
    authority = AuthorityFolder(run)
    assert authority.settings().line() == run.membership.authority_key
    open_store(authority).close()
    private = [tmp_path / "mine" / ".env", *(tmp_path / "mine" / "home").rglob("*.key"), authority.file]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folders.home(), authority.path)} == {0o700}


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.toml").write_text("precious")
    with pytest.raises(UsageError, match="exists, and nothing in it is overwritten"):
        make(answers(), tmp_path / "mine")
    assert (tmp_path / "mine" / "run.toml").read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        make(answers(), tmp_path / "link")


def test_a_failure_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "card", full)
    with pytest.raises(TTError, match=r"cannot make \S+/mine: No space left on device"):
        make(answers(), tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(TTError, match="cannot make"):
        make(answers(), tmp_path / "file" / "mine")


KILLED = """
import os, signal, sys
from pathlib import Path
from tt_cli.organise import recipe
from tt_cli.organise.questions import answered
recipe.card = lambda run: os.kill(os.getpid(), signal.SIGKILL)
recipe.make(answered("mine", {}, lambda question, default: default), Path(sys.argv[1]))
"""


def test_a_kill_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    killed = python(KILLED, str(tmp_path / "mine"))
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "mine").exists()
    make(answers(), tmp_path / "mine")


def test_the_container_is_nobody_elses(tmp_path: Path) -> None:
    make(answers(), tmp_path / "mine")
    settings = dict(line.split("=") for line in (tmp_path / "mine" / ".env").read_text().splitlines()[1:])
    owner = os.getuid() or room.CONTAINER_USER
    assert settings["TT_UID"] == str(owner) and len(settings["POSTGRES_PASSWORD"]) >= 30
    assert {path.stat().st_uid for path in (tmp_path / "mine" / "home").rglob("*")} == {owner}


def test_a_copied_folder_s_container_is_its_new_owner_s(tmp_path: Path) -> None:
    folder = make(answers(), tmp_path / "mine").folder
    head = (folder / "compose.yaml").read_text()
    assert f"#   {OWNER}\n" in head and OWNER in (ROOT / "docs" / "organise.md").read_text()
    assert any(OWNER in step for step in next_steps(folder, ""))
    before = (folder / ".env").read_text()
    there = (folder / "home").stat()
    (folder / ".env").write_text(re.sub(r"(TT_.ID)=\d+", r"\1=12345", before))
    subprocess.run(["sh", "-c", OWNER], cwd=folder, check=True)
    assert (folder / ".env").read_text() == before
    assert f"TT_UID={there.st_uid}\nTT_GID={there.st_gid}\n" in before


def test_the_next_steps_are_commands_of_this_run(tmp_path: Path) -> None:
    made = make(answers(**CLOSED), tmp_path / "my runs")
    steps = "\n".join(next_steps(made.folder, "", made.check))
    assert f"TT_HOME='{made.folder}'/home tt aux-peer '{made.folder}/run.toml' --port 4000" in steps
    assert f"tt check '{made.folder}/run.toml' --line" in steps and f"--out '{made.folder}' puts" in steps
    assert "--announce /dns4/tt.example.org/tcp/4000 --authority --trusted-proxy 127.0.0.1" in steps
    assert "volunteers: tt join run.toml" in steps and "docker compose up -d" in steps
    assert "volunteers: tt join acme/mine" in next_steps(made.folder, "acme/mine")

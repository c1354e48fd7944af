"""`tt init` as an organiser uses it: flags, a terminal, the Hub."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Tt
from end_to_end.conftest import one_line
from hub_standin import HubStandin

from tt_cli.run import load_run

pytestmark = pytest.mark.slow


def test_an_organisation_without_an_authority_is_told_to_be_unguarded(here: Tt) -> None:
    for name, flags, told in (("my-run", [], True), ("closed", ["--authority", "https://passes.example.org"], False)):
        answer = here("init", name, "--yes", "--size", "tiny", "--organisation", "acme", *flags)
        assert answer.returncode == 0
        assert ("No --authority was given: `tt join` asks who is a member" in answer.stdout) == told


def test_flags_make_a_folder_and_say_what_comes_next(here: Tt, tmp_path: Path) -> None:
    answer = here("init", "my-run", "--yes", "--address", "203.0.113.7", "--steps", "1_000")
    assert (answer.returncode, answer.stderr) == (0, "")
    run = load_run(str(tmp_path / "my-run" / "run.toml"))
    assert run.schedule.total_steps == 1000 and run.peers.initial[0] in answer.stdout
    assert "3.4M parameters" in answer.stdout
    assert f"tt check {tmp_path}/my-run/run.toml --line 20 --peers 16" in answer.stdout
    assert "nothing in it is overwritten" in one_line(here("init", "my-run", "--yes"), 2)


def test_json_is_one_object(here: Tt, tmp_path: Path) -> None:
    slow = ["--line", "0.5", "--peers", "4", "--inner-steps", "3"]
    answer = here("init", "my-run", "--yes", "--json", "--out", "there", "--size", "tiny", *slow)
    facts = json.loads(answer.stdout)
    assert facts["folder"] == str(tmp_path / "there") and facts["published"] is None and facts["address"] is None
    assert facts["identity"] == (run := load_run("there/run.toml")).identity and run.optimizer.name == "local"
    assert facts["lines"].startswith(
        "Your members send 0.5 Mbit/s: local steps, and of each 4,096 numbers the largest 256"
    )
    assert "after 3 inner steps of 32 examples by" in facts["lines"]
    assert facts["takes"]["fits"] == "a GPU with 4 GB" and "run.toml" in facts["files"]
    assert set(facts) == {"folder", "published", "next", "identity", "peer_id", "address", "takes", "lines", "files"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my-run"], "there is no terminal to ask on: give --task (default dalle), or --yes for all defaults"),
        (
            ["my-run", "--json", "--task", "dalle", "--size", "tiny"],
            "there is no terminal to ask on: give --data (default emoji), or --yes",
        ),
        (["My Run", "--yes"], "NAME My Run: must be 1 to 41 of a-z"),
        (["my-run", "--yes", "--size", "big"], "--size big: give tiny, small"),
        (["my-run", "--yes", "--publish"], "nobody is logged in here: run `tt login`"),
        ([], "missing argument 'NAME'; see `tt init --help`"),
    ],
)
def test_what_is_wrong_is_one_line(here: Tt, tmp_path: Path, arguments: list[str], words: str) -> None:
    answer = here("init", *arguments)
    assert answer.returncode in (1, 2) and words in answer.stderr and answer.stderr.count("\n") == 1
    assert not any(path.name.startswith(("my-run", ".my-run")) for path in tmp_path.iterdir())


def test_on_a_terminal_it_asks_until_the_answer_is_good(tmp_path: Path) -> None:
    """Empty lines take the defaults; a wrong one is answered and asked again."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tt_cli.cli.main", "init", "asked"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
    )
    os.close(theirs)
    lines = ["", "enormous", "tiny", "", "", "", "203.0.113.7", *[""] * 7]
    os.write(ours, "".join(f"{line}\n" for line in lines).encode())
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # the other side has ended
        pass
    os.close(ours)
    assert process.wait(60) == 0, said.decode()
    text = said.decode()
    assert "--size enormous: give tiny" in text and "paper  1024x64   125.9M" in text
    run = load_run(str(tmp_path / "asked" / "run.toml"))
    assert (run.model.dim, run.peers.initial[0][:21]) == (128, "/ip4/203.0.113.7/tcp/")


def test_published_it_is_joined_by_its_name(tt: Tt, hub: HubStandin, tmp_path: Path) -> None:
    hub.add_user("hf_write", "ada", {"acme": "write"}, role="write")
    env = {**hub.environment(tmp_path), "HF_TOKEN": "hf_write"}
    flags = ["--organisation", "acme", "--address", "203.0.113.7", "--yes"]
    made = tt("init", "my-run", *flags, "--publish", env=env)
    assert (made.returncode, made.stderr) == (0, "")
    assert "Volunteers type: tt join acme/my-run" in made.stdout
    commits = [line for line in hub.log() if line.startswith("POST") and "/commit/" in line]
    assert len(commits) == 1

    joined = tt("join", "acme/my-run", "--plain", env={**hub.environment(tmp_path), "HF_TOKEN": ""})
    assert "the run my-run admits members of acme on the Hub only, and nobody is logged in" in joined.stderr

    hub.put("model", "acme/my-run", {**hub.files("acme/my-run"), "README.md": "with words of ours, and step 40"})
    again = tt("init", "my-run", "--publish", "--json", env=env)  # what is there, once more
    assert json.loads(again.stdout)["published"] == f"{hub.url}/acme/my-run", again.stderr
    assert hub.files("acme/my-run")["README.md"] == b"with words of ours, and step 40"
    other = tt("init", "my-run", *flags, "--size", "tiny", "--publish", "--out", "other", env=env)
    assert "it holds the run my-run-" in one_line(other, 2)


def test_a_card_on_the_hub_names_where_it_is(tt: Tt, hub: HubStandin, tmp_path: Path) -> None:
    """Also where the folder was made before anybody said to which repository; an edited one goes there as it is."""
    hub.add_user("hf_write", "ada", role="write")
    env = {**hub.environment(tmp_path), "HF_TOKEN": "hf_write"}
    assert tt("init", "my-run", "--yes", env=env).returncode == 0
    assert "tt join run.toml" in (card := tmp_path / "my-run" / "README.md").read_text()
    assert tt("init", "my-run", "--publish", env=env).returncode == 0
    there = hub.files("ada/my-run")["README.md"].decode()
    assert "tt join ada/my-run\n" in there and "run.toml" not in there and "<!-- checkpoints -->" in there
    card.write_text("with words of ours")
    assert tt("init", "my-run", "--publish", "--repository", "ada/again", env=env).returncode == 0
    assert hub.files("ada/again")["README.md"] == b"with words of ours"


def test_a_hub_that_refuses_is_one_line(tt: Tt, hub: HubStandin, tmp_path: Path) -> None:
    hub.add_user("hf_read", "ada", {"acme": "read"}, role="read")
    env = {**hub.environment(tmp_path), "HF_TOKEN": "hf_read"}
    answer = tt("init", "my-run", "--yes", "--publish", env=env)
    assert "cannot publish my-run in ada/my-run: the Hub refuses access (403)" in one_line(answer, 2)
    hub.add_user("hf_write", "ada", role="write")
    hub.fault("/commit/", status=503)
    env["HF_TOKEN"] = "hf_write"
    answer = tt("init", "my-run", "--publish", env=env)
    assert "the Hub answered 503; try again later" in one_line(answer, 1)
    hub.put("model", "ada/my-run", {"README.md": "somebody's"})
    hub.fault("/commit/", status=412)
    answer = tt("init", "my-run", "--publish", env=env)
    assert "somebody else changed it meanwhile; try again" in one_line(answer, 1)

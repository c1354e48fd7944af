"""Which runs ask for a login, and whom they admit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_standin import HubStandin

from tt_cli.auth import eligibility
from tt_cli.run import load_run

ASK = """
import json, sys
from tt_cli.auth import eligibility
from tt_cli.errors import TTError
from tt_cli.run import load_run
for path in sys.argv[1:]:
    try:
        member = eligibility.require_member(load_run(path))
        answer = [0, member and member.name, eligibility.current_user()]
    except TTError as error:
        answer = [error.exit_code, str(error)]
    print(json.dumps(answer))
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Files of an open run, one of acme and one of zoo."""
    paths = []
    for name in ("open", "acme", "zoo"):
        changes = {"run.name": name}
        if name != "open":
            changes |= {"membership.kind": "organisation", "membership.organisation": name}
        path = tmp_path / f"{name}.toml"
        path.write_text(load_run("emoji").replaced(changes).to_toml())
        paths.append(str(path))
    return paths


def ask(environment: dict[str, str], runs: list[str]) -> list[list[object]]:
    answer = subprocess.run(
        [sys.executable, "-c", ASK, *runs],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_a_member_is_admitted_and_others_are_told_what_to_do(hub: HubStandin, tmp_path: Path, runs: list[str]) -> None:
    hub.add_user("hf_ada", "ada", organisations={"ACME": "read"})
    answers = ask({**hub.environment(tmp_path), "HF_TOKEN": "hf_ada"}, runs)
    assert answers[:2] == [[0, None, "ada"], [0, "ada", "ada"]]
    assert answers[2] == [
        2,
        "the run zoo admits members of zoo on the Hub only, and ada is none: ask the organisation to add "
        "you, or run `tt login` with another account",
    ]
    assert hub.log().count("GET /api/whoami-v2") == 1  # it is rate-limited


def test_a_stale_token_keeps_nobody_from_an_open_run(hub: HubStandin, tmp_path: Path, runs: list[str]) -> None:
    answers = ask({**hub.environment(tmp_path), "HF_TOKEN": "hf_stale"}, runs)
    assert answers[0] == [0, None, None]
    assert answers[1][0] == 2
    assert str(answers[1][1]).endswith("the Hub refuses the token; HF_TOKEN is set: correct or unset it")


def test_nobody_logged_in_may_join_open_runs_only(hub: HubStandin, tmp_path: Path, runs: list[str]) -> None:
    answers = ask(hub.environment(tmp_path), runs)
    assert answers[0] == [0, None, None]
    assert answers[1] == [
        2,
        "the run acme admits members of acme on the Hub only, and nobody is logged in here: run `tt login`",
    ]
    assert "GET /api/whoami-v2" not in hub.log()


def test_without_the_hub_open_runs_go_on_and_others_say_why(tmp_path: Path, runs: list[str]) -> None:
    offline = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_TOKEN": "hf_x",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    answers = ask(offline, runs)
    assert answers[0] == [0, None, None]
    assert answers[1][0] == 1
    assert str(answers[1][1]).startswith("cannot ask the Hub who you are: the Hugging Face Hub cannot be reached (")


def test_the_built_in_run_asks_for_nothing() -> None:
    assert eligibility.require_member(load_run("emoji")) is None

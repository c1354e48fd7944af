"""Which runs ask for a login, and whom they admit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_standin import HubStandin
from testbed.spawned import python

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
    """Files of an open run, and of one of acme."""
    paths = []
    for name in ("open", "acme"):
        changes = {"run.name": name}
        if name != "open":
            changes |= {"membership.kind": "organisation", "membership.organisation": name}
        path = tmp_path / f"{name}.toml"
        path.write_text(load_run("emoji").replaced(changes).to_toml())
        paths.append(str(path))
    return paths


def ask(environment: dict[str, str], runs: list[str]) -> list[list[object]]:
    answer = python(ASK, *runs, env=environment)
    answer.check_returncode()
    return [json.loads(line) for line in answer.stdout.splitlines()]


pytestmark = pytest.mark.slow

HUB_AWAY = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
ACME = "the run acme admits members of acme on the Hub only, and "


@pytest.mark.parametrize(
    ("environment", "user", "code", "words"),
    [
        ({"HF_TOKEN": "hf_ada"}, "ada", 0, "ada"),
        ({"HF_TOKEN": "hf_bob"}, "bob", 2, f"{ACME}bob is none: ask the organisation to add you, or run `tt login`"),
        ({"HF_TOKEN": "hf_stale"}, None, 2, "the Hub refuses the token; HF_TOKEN is set: correct or unset it"),
        ({}, None, 2, f"{ACME}nobody is logged in here: run `tt login`"),
        (
            {"HF_TOKEN": "hf_ada", **HUB_AWAY},
            *(None, 1, "cannot ask the Hub who you are: the Hugging Face Hub cannot be reached ("),
        ),
    ],
)
def test_members_are_admitted_others_told_what_to_do_and_open_runs_go_on(
    environment: dict[str, str],
    user: str | None,
    code: int,
    words: str,
    hub: HubStandin,
    tmp_path: Path,
    runs: list[str],
) -> None:
    hub.add_user("hf_ada", "ada", organisations={"ACME": "read"})
    hub.add_user("hf_bob", "bob", organisations={"zoo": "admin"})
    of_open, of_acme = ask({**hub.environment(tmp_path), **environment}, runs)
    assert of_open == [0, None, user]
    assert of_acme[0] == code and words in str(of_acme[1])
    assert code or hub.log().count("GET /api/whoami-v2") == 1  # it is rate-limited

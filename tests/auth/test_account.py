"""`tt login`, `tt whoami` and `tt logout` with the real client against a stand-in for the Hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Tt
from hub_standin import HubStandin

pytestmark = pytest.mark.slow


def said(answer: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return answer.returncode, answer.stdout, answer.stderr


@pytest.fixture
def environment(hub: HubStandin, tmp_path: Path) -> dict[str, str]:
    hub.add_user("hf_ada", "ada", organisations={"acme": "admin", "zoo": "read"})
    hub.add_user("hf_bob", "bob")
    return hub.environment(tmp_path)


def test_login_with_a_token_whoami_and_logout(tt: Tt, environment: dict[str, str]) -> None:
    login = tt("login", "--token", "hf_ada", env=environment)
    assert said(login) == (0, "Logged in as ada.\nOrganisations:\n  acme  admin\n  zoo  read\n", "")

    home = Path(environment["HF_HOME"])
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert any("hf_ada" in path.read_text() for path in kept)
    for path in kept:
        if "hf_ada" in path.read_text():
            assert path.stat().st_mode & 0o777 == 0o600, path

    assert tt("whoami", env=environment).stdout == login.stdout
    answer = json.loads(tt("whoami", "--json", env=environment).stdout)
    assert answer == {
        "name": "ada",
        "full_name": "Ada",
        "organisations": [{"name": "acme", "role": "admin"}, {"name": "zoo", "role": "read"}],
        "token": "login",
    }

    assert said(tt("logout", env=environment)) == (0, "Logged out.\n", "")
    assert not any("hf_ada" in path.read_text() for path in home.rglob("*") if path.is_file())
    assert tt("logout", env=environment).stdout == "Nobody was logged in.\n"
    assert said(tt("whoami", env=environment)) == (1, "", "tt: nobody is logged in here: run `tt login`\n")


def test_a_token_is_taken_from_standard_input(tt: Tt, environment: dict[str, str]) -> None:
    for token in (["--token"], ["--token", "-"]):
        login = tt("login", *token, env=environment, stdin="  hf_bob\n")
        assert login.stdout.startswith("Logged in as bob.\nNo organ")
    empty = tt("login", "--token", env=environment, stdin="\n")
    assert empty.returncode == 2 and empty.stderr.startswith("tt: no token was given")


def test_a_wrong_token_is_refused_and_nothing_kept(tt: Tt, environment: dict[str, str]) -> None:
    refused = "tt: cannot log in: the Hub refuses the token; run `tt login` with a valid one\n"
    assert said(tt("login", "--token", "hf_wrong", env=environment)) == (2, "", refused)
    organisation = tt("login", "--token", "api_org_x", env=environment)
    assert organisation.returncode == 2 and "not an organization token" in organisation.stderr
    assert tt("whoami", env=environment).returncode == 1


def test_hf_token_wins_and_that_is_said(tt: Tt, environment: dict[str, str]) -> None:
    with_variable = {**environment, "HF_TOKEN": "hf_bob"}
    assert tt("whoami", env=with_variable).stdout == "Logged in as bob (by HF_TOKEN).\nNo organisations.\n"
    login = tt("login", "--token", "hf_ada", env=with_variable)
    assert login.stdout.startswith("The login is stored, but HF_TOKEN is set and wins over it: unset HF_TOKEN")
    assert "Logged in as bob (by HF_TOKEN)." in login.stdout
    assert login.stderr == ""
    assert tt("whoami", env=environment).stdout.startswith("Logged in as ada.")
    still = "tt: HF_TOKEN is set and still logs you in: unset it\n"
    assert said(tt("logout", env=with_variable)) == (1, "Logged out.\n", still)
    assert tt("whoami", env=environment).returncode == 1

    stale = tt("whoami", env={**environment, "HF_TOKEN": "hf_wrong"})
    assert stale.returncode == 2
    assert stale.stderr.endswith("the Hub refuses the token; HF_TOKEN is set: correct or unset it\n")
    for command in ("whoami", "login --token hf_é"):
        garbled = tt(*command.split(), env={**environment, "HF_TOKEN": "hf_é"})
        assert garbled.returncode == 2 and "or a name has letters that none has\n" in garbled.stderr


def start_device_login(environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Start `tt login` without a terminal; return it and the code that it shows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tt_cli.cli.main", "login"],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"enter the code: (\S+)", line):
            return process, found[1]
    raise AssertionError(process.communicate())


def test_device_flow_without_a_terminal(tt: Tt, hub: HubStandin, environment: dict[str, str]) -> None:
    process, code = start_device_login(environment)
    hub.decide(code, "approve:hf_ada")
    output, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert "Logged in as ada." in output
    assert tt("whoami", env=environment).stdout.startswith("Logged in as ada.")


@pytest.mark.parametrize(
    ("decision", "said"), [("access_denied", "Authorization was denied"), ("expired_token", "Device code expired")]
)
def test_a_device_login_that_is_denied(hub: HubStandin, environment: dict[str, str], decision: str, said: str) -> None:
    process, code = start_device_login(environment)
    hub.decide(code, decision)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.startswith(f"tt: cannot log in: {said}")
    assert errors.count("\n") == 1


def test_a_hub_that_fails_or_limits_is_one_line(tt: Tt, hub: HubStandin, environment: dict[str, str]) -> None:
    limits = "the Hub limits how often that is asked; wait a few minutes"
    for status, words in ((429, limits), (500, "the Hub answered 500; try again later")):
        hub.fault("whoami", status=status)
        answer = tt("whoami", env={**environment, "HF_TOKEN": "hf_ada"})
        assert said(answer) == (1, "", f"tt: cannot ask the Hub who you are: {words}\n")


def test_without_a_network_it_is_one_line(tt: Tt, environment: dict[str, str]) -> None:
    offline = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    for arguments, variables in (("whoami", {"HF_TOKEN": "hf_ada"}), ("login", {}), ("login --token hf_ada", {})):
        code, _, errors = said(tt(*arguments.split(), env={**offline, **variables}))
        assert code == 1 and "cannot be reached" in errors and errors.count("\n") == 1, arguments


def test_a_token_that_cannot_be_kept_is_one_line(tt: Tt, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("")
    answer = tt("login", "--token", "hf_ada", env={**environment, "HF_HOME": str(tmp_path / "in-the-way")})
    assert answer.returncode == 1
    assert answer.stderr == (
        f"tt: cannot log in: {tmp_path}/in-the-way: File exists; "
        "free space or set HF_HOME to a folder that you can write to\n"
    )


HURRIED = """
import time
from tt_cli.auth import account
from tt_cli.errors import TTError
from tt_cli.hub import hub_files
hub_files.TIMEOUT = 0.3
start = time.monotonic()
try:
    account.whoami()
except TTError as error:
    print(error)
print(time.monotonic() - start < 20)
"""


def test_a_hub_that_hangs_is_given_up(hub: HubStandin, environment: dict[str, str]) -> None:
    hub.fault("whoami", status=0, delay=20)
    answer = subprocess.run(
        [sys.executable, "-c", HURRIED],
        env={**os.environ, **environment, "HF_TOKEN": "hf_ada"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    said, in_time = answer.stdout.splitlines()
    assert said.startswith("cannot ask the Hub who you are: the Hugging Face Hub cannot be reached (")
    assert in_time == "True"

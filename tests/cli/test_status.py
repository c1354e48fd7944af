"""`tt status`, `pause`, `resume` and `finish`, as a person or cron types them, against supervisors that run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tt
from supervisor.acting import WAIT, start_boss, until

from tt_cli.supervisor.control_socket import answering
from tt_cli.supervisor.peer_state import PeerState

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tt_home: Path) -> Iterator[Start]:
    """start(identity, kind="peer"): a supervisor whose worker trains already; it says that its run is "emoji"."""
    bosses = []

    def begin(identity: str, kind: str = "peer") -> subprocess.Popen[str]:
        folder = tt_home / "runs" / identity
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        bosses.append(start_boss("obey", folder, kind))
        until(bosses[-1], '"training"')
        return bosses[-1]

    yield begin
    for boss in bosses:
        boss.kill()
        boss.communicate()


def said(answer: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return answer.returncode, answer.stdout, answer.stderr


def test_where_nothing_has_run(here: Tt, tt_home: Path) -> None:
    words = f"no peer has run on this machine (in {tt_home}); `tt join RUN` starts one\n"
    assert said(here("status")) == (3, words, "")
    assert json.loads(here("status", "emoji", "--json").stdout) == {"peers": []}
    for command in ("pause", "resume", "finish"):
        assert said(here(command)) == (3, "", "tt: no peer runs on this machine; see `tt status`\n")
    assert said(here("pause", "emoji"))[2] == "tt: no peer of run emoji runs on this machine; see `tt status`\n"


def test_a_peer_is_paused_and_goes_on_and_finishes(here: Tt, start: Start) -> None:
    boss = start("emoji-1a2b3c4d")
    code, output, _ = said(here("status"))
    assert code == 0 and output.startswith("emoji · training for ")
    code, output, _ = said(here("pause", "--for", "1h30m"))
    assert code == 0 and output.startswith("emoji: writes a backup, leaves the swarm and is paused until ")
    until(boss, '"paused"')
    (peer,) = json.loads(here("status", "emoji", "--json").stdout)["peers"]
    assert (peer["running"], peer["state"], peer["paused"]) == (True, "paused", True)
    assert peer["paused_until"] - peer["since"] == pytest.approx(5400, abs=WAIT)
    assert said(here("resume", "emoji-1a2b3c4d")) == (0, "emoji: starts again\n", "")
    until(boss, '"training"')
    assert said(here("finish")) == (0, "emoji: ends after its first step\n", "")
    assert boss.wait(WAIT) == 0
    code, output, _ = said(here("status", "emoji"))
    assert code == 3 and output.startswith("emoji · ended ") and output.endswith(" · left\n")


def test_one_of_several_must_be_named(here: Tt, start: Start) -> None:
    boss, other = start("emoji-1a2b3c4d"), start("emoji-5e6f7a8b")
    answer = here("pause")
    assert said(answer) == (2, "", "tt: 2 peers run on this machine: name the run of one (emoji)\n")
    assert said(here("finish", "emoji-5e6f7a8b"))[0] == 0
    assert other.wait(WAIT) == 0
    assert boss.poll() is None


def test_one_that_hangs_keeps_no_other_from_being_told(here: Tt, start: Start, tt_home: Path) -> None:
    def hang_up(request: dict[str, Any]) -> dict[str, Any]:
        raise ValueError

    boss, folder = start("emoji-5e6f7a8b"), tt_home / "runs" / "emoji-1a2b3c4d"
    folder.mkdir()
    PeerState(run="emoji", identity=folder.name).write(folder / "peer.json")
    with answering(folder / "peer.sock", hang_up):
        code, output, errors = said(here("pause", "emoji"))
    assert (code, output.count("\n"), output.startswith("emoji: writes a backup")) == (1, 1, True)
    assert errors == f"tt: the supervisor at {folder / 'peer.sock'} does not answer: it hung up\n"
    until(boss, '"paused"')


def test_an_auxiliary_peer_is_meant_only_where_no_trainer_runs(here: Tt, start: Start) -> None:
    aux, trainer = start("emoji-1a2b3c4d", "aux-peer"), start("emoji-1a2b3c4d")
    assert here("status").stdout.count(" · training for ") == 2
    assert "emoji (aux peer) · " in here("status").stdout
    assert here("finish").stdout == "emoji: ends after its first step\n"
    assert trainer.wait(WAIT) == 0
    refused = "tt: emoji: an aux peer cannot be paused: others need it; `tt finish` ends it\n"
    assert said(here("pause", "emoji")) == (1, "", refused)
    assert said(here("finish", "emoji")) == (0, "emoji: ends now\n", "")
    assert aux.wait(WAIT) == 0


@pytest.mark.parametrize("time", ["", "2", "h", "2h3", "-1h", "0s", "367d", "1w"])
def test_a_wrong_time_is_one_line(time: str, here: Tt) -> None:
    code, _, errors = said(here("pause", f"--for={time}"))
    assert code == 2 and errors.startswith("tt: --for: ") and errors.count("\n") == 1

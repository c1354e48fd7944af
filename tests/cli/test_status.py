"""`tt status`, `pause`, `resume` and `finish`, as a person or cron types them, against supervisors that run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor.acting import ENVIRONMENT, WAIT

pytestmark = pytest.mark.slow

Tt = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tt_home: Path) -> Iterator[Start]:
    """start(identity, kind="peer"): a supervisor whose worker trains already; it says that its run is "emoji"."""
    bosses = []

    def begin(identity: str, kind: str = "peer") -> subprocess.Popen[str]:
        folder = tt_home / "runs" / identity
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        boss = subprocess.Popen(
            [sys.executable, "-m", "workers.boss", "obey", str(folder / "log"), str(folder), kind],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            text=True,
        )
        bosses.append(boss)
        until(boss, '"training"')
        return boss

    yield begin
    for boss in bosses:
        boss.kill()
        boss.communicate()


def until(boss: subprocess.Popen[str], words: str) -> None:
    """Read what a supervisor prints, up to a line with these words."""
    assert boss.stdout is not None
    while words not in (line := boss.stdout.readline()):
        assert line, "the supervisor has ended"


def said(answer: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return answer.returncode, answer.stdout, answer.stderr


def test_where_nothing_has_run(tt: Tt, tt_home: Path) -> None:
    words = f"no peer has run on this machine (in {tt_home}); `tt join RUN` starts one\n"
    assert said(tt("status")) == (3, words, "")
    assert json.loads(tt("status", "emoji", "--json").stdout) == {"peers": []}
    for command in ("pause", "resume", "finish"):
        assert said(tt(command)) == (3, "", "tt: no peer runs on this machine; see `tt status`\n")
    assert said(tt("pause", "emoji"))[2] == "tt: no peer of run emoji runs on this machine; see `tt status`\n"


def test_a_peer_is_paused_and_goes_on_and_finishes(tt: Tt, start: Start) -> None:
    boss = start("emoji-1a2b3c4d")
    code, output, _ = said(tt("status"))
    assert code == 0 and output.startswith("emoji · training for ")
    code, output, _ = said(tt("pause", "--for", "1h30m"))
    assert code == 0 and output.startswith("emoji: writes a backup, leaves the swarm and is paused until ")
    until(boss, '"paused"')
    (peer,) = json.loads(tt("status", "emoji", "--json").stdout)["peers"]
    assert (peer["running"], peer["state"], peer["paused"]) == (True, "paused", True)
    assert peer["paused_until"] - peer["since"] == pytest.approx(5400, abs=WAIT)
    assert said(tt("resume", "emoji-1a2b3c4d")) == (0, "emoji: starts again\n", "")
    until(boss, '"training"')
    assert said(tt("finish")) == (0, "emoji: ends after its first step\n", "")
    assert boss.wait(WAIT) == 0
    code, output, _ = said(tt("status", "emoji"))
    assert code == 3 and output.startswith("emoji · ended ") and output.endswith(" · left\n")


def test_one_of_several_must_be_named(tt: Tt, start: Start) -> None:
    boss, other = start("emoji-1a2b3c4d"), start("emoji-5e6f7a8b")
    answer = tt("pause")
    assert said(answer) == (2, "", "tt: 2 peers run on this machine: name the run of one (emoji)\n")
    assert said(tt("finish", "emoji-5e6f7a8b"))[0] == 0
    assert other.wait(WAIT) == 0
    assert boss.poll() is None


def test_an_auxiliary_peer_is_meant_only_where_no_trainer_runs(tt: Tt, start: Start) -> None:
    aux, trainer = start("emoji-1a2b3c4d", "aux-peer"), start("emoji-1a2b3c4d")
    assert tt("status").stdout.count(" · training for ") == 2
    assert "emoji (aux peer) · " in tt("status").stdout
    assert tt("finish").stdout == "emoji: ends after its first step\n"
    assert trainer.wait(WAIT) == 0
    refused = "tt: emoji: an aux peer cannot be paused: others need it; `tt finish` ends it\n"
    assert said(tt("pause", "emoji")) == (1, "", refused)
    assert said(tt("finish", "emoji")) == (0, "emoji: ends now\n", "")
    assert aux.wait(WAIT) == 0


@pytest.mark.parametrize("time", ["", "2", "h", "2h3", "-1h", "0s", "367d", "1w"])
def test_a_wrong_time_is_one_line(time: str, tt: Tt) -> None:
    code, _, errors = said(tt("pause", f"--for={time}"))
    assert code == 2 and errors.startswith("tt: --for: ") and errors.count("\n") == 1

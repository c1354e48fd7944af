"""Rounds in every order of events, by the model checker Spin: no two honest members step with unlike averages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.debian]

ROUND, ATTEMPTS = (Path(__file__).with_name(name) for name in ("round.pml", "attempts.pml"))


def counterexample(folder: Path, model: Path, *defined: str) -> bool:
    """Whether there is an order of events in which the model breaks its promise, after looking at all of them."""
    for command in (
        ["spin", "-a", *defined, str(model)],
        ["gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    said = subprocess.run(["./pan", "-E", "-m100000"], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert "Search not completed" not in said or "assertion violated" in said, said
    assert "max search depth too small" not in said, said
    return "assertion violated" in said


@pytest.mark.parametrize(
    "defined",
    [
        "-DN=2 -DBACKUP",
        "-DN=3 -DBACKUP",
        "-DN=4 -DBACKUP",
        "-DN=4 -DLIES",
        "-DN=4 -DLIES -DLEADER",
        "-DN=5 -DLIES -DLEADER",
    ],
)
def test_no_two_step_with_unlike_averages_whatever_is_lost(tmp_path: Path, defined: str) -> None:
    assert not counterexample(tmp_path, ROUND, *defined.split())


@pytest.mark.parametrize(
    "without",
    [
        *("-DN=4 -DLIES -DHEARD", "-DN=4 -DLIES -DHALF", "-DN=3 -DBACKUP -DTWICE"),
        *("-DN=4 -DLIES -DLEADER -DFEW", "-DN=5 -DLIES -DLEADER -DGROUP"),
    ],
)
def test_without_one_of_its_rules_the_model_finds_how_they_would(tmp_path: Path, without: str) -> None:
    assert counterexample(tmp_path, ROUND, *without.split())


@pytest.mark.parametrize("defined", ["-DN=2 -DK=3", "-DN=3 -DK=2", "-DN=4 -DK=2 -DLIES"])
def test_what_one_made_a_step_no_later_round_makes_otherwise(tmp_path: Path, defined: str) -> None:
    assert not counterexample(tmp_path, ATTEMPTS, *defined.split())


@pytest.mark.parametrize(
    "without", ["-DN=3 -DK=2 -DFORGET", "-DN=4 -DK=2 -DLIES -DBELIEVE", "-DN=4 -DK=2 -DLIES -DONCE"]
)
def test_without_what_members_show_of_their_votes_a_step_is_lost(tmp_path: Path, without: str) -> None:
    assert counterexample(tmp_path, ATTEMPTS, *without.split())

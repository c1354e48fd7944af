"""`tt explain`: each line that the page quotes is found again, and every error has a section."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Tt

from tests.docs.links import anchors
from tt_cli import errors
from tt_cli.errors import TTError
from tt_cli.terminal.troubleshooting import BY_ROOM, OTHERWISE, documentation, explaining, of_error, sections

ROOT = Path(__file__).parents[2]


def test_topics_are_the_anchors_of_the_page() -> None:
    assert set(sections()) < anchors(documentation() / "troubleshooting.md")
    assert {*BY_ROOM.values(), OTHERWISE} <= set(sections())
    rooms = {
        path.stem for path in (ROOT / "tt_cli").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__", "__main__", "errors"} == {*BY_ROOM, "cli"}


def test_each_quoted_line_is_found_again() -> None:
    lines = 0
    for section in sections().values():
        for quote in re.findall(r"^\| `([^`]+)` \|", section.text, flags=re.MULTILINE):
            if " " not in quote.strip("… "):
                continue
            found = explaining(quote.replace("…", "something 3.2 GiB"))
            assert found is not None and found.anchor == section.anchor, quote
            lines += 1
    assert lines > 70


def test_an_error_that_is_not_quoted_has_the_section_of_its_room() -> None:
    """It is raised where the code of tt raises it; only its words are other ones."""
    load = importlib.import_module("tt_cli.run.run_source")
    with pytest.raises(TTError) as raised:
        load.load_run("no-such-run")
    assert of_error(raised.value) == "runs-and-run-files"
    raised.value.args = ("words that nobody wrote down",)
    assert of_error(raised.value) == "runs-and-run-files"
    assert of_error(errors.UsageError("words that nobody wrote down")) == OTHERWISE


def test_what_it_prints(here: Tt) -> None:
    listed = here("explain")
    assert listed.returncode == 0 and [line.split()[0] for line in listed.stdout.splitlines()] == list(sections())
    clock = here("explain", "clock")
    assert "timedatectl" in clock.stdout and "(#" not in clock.stdout
    assert here("explain", "no", "group", "formed", "in", "time").stdout == here("explain", "matchmaking").stdout
    assert here("explain", "DHT").returncode == 0 and here("explain", "Data stream").returncode == 0
    found = json.loads(here("explain", "membership", "--json").stdout)
    assert found["topic"] == "membership" and "bans" not in found["title"] and "|" in found["text"]
    wrong = here("explain", "run")
    assert wrong.returncode == 2 and "did you mean runs-and-run-files or running-peers?" in wrong.stderr
    assert here("explain", "nonsense").stderr == (
        "tt: nothing is written about 'nonsense'; `tt explain` lists the topics\n"
    )


def test_a_person_is_told_where_more_is_written_and_a_program_is_not(here: Tt) -> None:
    assert len(here("monitor", "no-such-run").stderr.splitlines()) == 1
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "tt_cli.cli.main", "monitor", "no-such-run"]
    ran = subprocess.run(command, check=False, stderr=end, stdout=subprocess.DEVNULL, cwd=ROOT)
    os.close(end)
    said = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert ran.returncode == 2
    assert said.splitlines()[-1].strip() == "more: tt explain runs-and-run-files"

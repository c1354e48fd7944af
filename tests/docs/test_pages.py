"""The documentation: links lead somewhere, what is made from code is what the code makes, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from scripts import build_cli_reference, build_diagram, build_frontier
from tests.docs.links import anchors, broken, links
from tt_cli.cli.main import COMMANDS
from tt_cli.run.run_source import builtin_runs
from tt_cli.supervisor.supervise import LEAVE_SECONDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_exist(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c's\n\n[1](#a-b-cs) [2](#none) [3](page.md#none) [4](none.md) [5](https://e.org) `[6](no)`\n"
    )
    assert list(links(page)) == ["#a-b-cs", "#none", "page.md#none", "none.md"]
    assert anchors(page) == {"a-b-cs"}
    assert broken(page) == ["#none: no such heading", "page.md#none: no such heading", "none.md: no such file"]


@pytest.mark.parametrize(
    ("name", "made"),
    [(build_cli_reference.PAGE, build_cli_reference.page), (build_cli_reference.MAN, build_cli_reference.man)],
)
def test_the_command_reference_is_current(name: str, made: object) -> None:
    assert callable(made)
    hint = "run scripts/build_cli_reference.py and commit"
    assert (ROOT / name).read_text(encoding="utf-8") == made(), hint


def test_the_command_reference_has_every_command() -> None:
    assert {f"tt-{command.name}" for command in COMMANDS} <= anchors(ROOT / build_cli_reference.PAGE)


def test_the_diagram_is_current_and_names_files_that_exist() -> None:
    assert build_diagram.FILE.read_text(encoding="utf-8") == build_diagram.picture(), "run scripts/build_diagram.py"
    for _, _, file in build_diagram.STAGES:
        assert (ROOT / "tt_cli" / file).is_file()


def test_the_frontier_is_that_of_the_newest_record() -> None:
    made = build_frontier.picture(build_frontier.newest())
    assert build_frontier.FILE.read_text(encoding="utf-8") == made, "run python -m scripts.build_frontier"


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+")
    for page in site.rglob("*.html"):
        assert not loaded.findall(page.read_text(encoding="utf-8")), page.name


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.parametrize("name", ["join", "infer"])
@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("https://e.org/tt.git", "tt-cli[EXTRAS] @ git+https://e.org/tt.git"),
        ("git+https://e.org/tt.git", "tt-cli[EXTRAS] @ git+https://e.org/tt.git"),
        (str(ROOT), f"{ROOT}[EXTRAS]"),
        ("", ""),
    ],
)
def test_a_notebook_installs_tt_from_its_source(
    name: str, source: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4).cells
    commands: list[list[str]] = []
    monkeypatch.setenv("TT_NOTEBOOK_SOURCE", source)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    names: dict[str, object] = {}
    exec(cells[1].source, names)
    if not source:
        with pytest.raises(SystemExit, match="^tt is not installed here, nor on PyPI: set SOURCE to "):
            exec(cells[2].source, names)
        assert not commands
        return
    exec(cells[2].source, names)
    assert commands[0][-1] == package.replace("EXTRAS", "lm,numba" if name == "join" else "numba")


def test_examples_name_runs_as_tt_knows_them() -> None:
    for page in PAGES:
        for name in re.findall(r"^tt .*--run (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert name in builtin_runs() or name.endswith(".toml"), f"{page.name}: --run {name}"


def test_no_page_installs_the_program_of_this_name_on_pypi() -> None:
    """pip takes an installed distribution's extras; in a fresh environment it would fetch somebody else's tt-cli."""
    for page in (*PAGES, *(ROOT / "docs" / "notebooks").glob("*.ipynb"), *(ROOT / "configs").rglob("*.service")):
        assert not re.search(r"pip install [^`\n]*tt-cli", page.read_text(encoding="utf-8")), page.name


def test_a_service_ends_tt_alone_and_gives_it_the_time() -> None:
    """By default systemd signals every process of a service, and the p2p daemon ends before the peer has left."""
    page = (ROOT / "docs" / "join.md").read_text(encoding="utf-8")
    settings = dict(re.findall(r"^([A-Z]\w+)=(.*)$", page.partition("[Service]")[2], re.MULTILINE))
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) > LEAVE_SECONDS

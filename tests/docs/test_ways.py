"""The ways of docs/how-it-works.md, file by file: each file is there, defines what is said of it, and is reached."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-it-works.md"
ENTRY = re.compile(r"^\d+\. `([\w/.-]+)` `([\w.]+)`: ", re.MULTILINE)
LONGEST = {"A gradient": 18, "A state": 9, "A pass": 8, "A record": 8}


def ways() -> dict[str, list[tuple[str, str]]]:
    """Title of a way → its files below tt_cli, in order, each with the name that the way goes through."""
    text = PAGE.read_text(encoding="utf-8").split("## The ways, file by file", 1)[1].split("\n## ", 1)[0]
    sections = dict(part.split("\n", 1) for part in text.split("\n### ")[1:])
    return {title.partition(",")[0].partition(" (")[0]: ENTRY.findall(body) for title, body in sections.items()}


def names_in(file: Path) -> set[str]:
    """Names that a file defines: functions, classes, their methods as Class.method, and assigned ones."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Files below tt_cli → those that they import, anywhere in them; a package stands for all files in it."""
    package, found = ROOT / "tt_cli", {}
    for file in package.rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        modules = {
            f"{node.module}{rest}" for node in nodes for rest in ("", *(f".{alias.name}" for alias in node.names))
        }
        paths = [ROOT.joinpath(*module.split(".")) for module in modules if module.startswith("tt_cli.")]
        files = {inside for path in paths if path.is_dir() for inside in path.glob("*.py")}
        files |= {path.with_suffix(".py") for path in paths if path.with_suffix(".py").is_file()}
        found[str(file.relative_to(package))] = {str(path.relative_to(package)) for path in files}
    return found


def meet(one: str, other: str) -> bool:
    """Tell whether one file imports the other, or a third one brings both together."""
    known = imports()
    return other in known[one] or one in known[other] or any({one, other} <= files for files in known.values())


@pytest.mark.parametrize("way", LONGEST)
def test_each_file_of_a_way_is_there_and_holds_what_is_said(way: str) -> None:
    files = ways()[way]
    assert 1 < len({file for file, _ in files}) <= LONGEST[way]
    for file, name in files:
        assert name in names_in(ROOT / "tt_cli" / file), f"{file} has no {name}"


@pytest.mark.parametrize("way", LONGEST)
def test_each_file_of_a_way_meets_one_before_it(way: str) -> None:
    files = [file for file, _ in ways()[way]]
    for number, file in enumerate(files[1:], start=1):
        assert any(meet(file, before) for before in files[:number]), f"nothing leads to {file}"


def test_files_that_have_nothing_to_do_with_each_other_do_not_meet() -> None:
    assert not meet("web/queries.py", "optim/lamb.py")

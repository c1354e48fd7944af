"""The ways of docs/how-it-works.md, file by file: each file is there, defines what is said of it, and is reached."""

from __future__ import annotations

import ast
import re
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
    if file.suffix == ".ts":
        return set(re.findall(r"\bfunction (\w+)", file.read_text(encoding="utf-8")))
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


def imported_by(file: Path) -> set[str]:
    """Files below tt_cli that a file imports, anywhere in it; for a script of the page: other scripts."""
    text, package = file.read_text(encoding="utf-8"), ROOT / "tt_cli"
    if file.suffix == ".ts":
        beside = (file.parent / f"{name}.ts" for name in re.findall(r'from "\./(\w+)"', text))
        return {str(path.relative_to(package)) for path in beside}
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = (ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules if module.startswith("tt_cli."))
    return {str(path.relative_to(package)) for path in files if path.is_file()}


@pytest.mark.parametrize("way", LONGEST)
def test_each_file_of_a_way_is_there_and_holds_what_is_said(way: str) -> None:
    files = ways()[way]
    assert 1 < len({file for file, _ in files}) <= LONGEST[way]
    for file, name in files:
        assert name in names_in(ROOT / "tt_cli" / file), f"{file} has no {name}"


@pytest.mark.parametrize("way", LONGEST)
def test_each_file_of_a_way_meets_another_one(way: str) -> None:
    files = {file for file, _ in ways()[way]}
    imports = {file: imported_by(ROOT / "tt_cli" / file) & files for file in files}
    for file in files:
        beside = imports[file] | {other for other in files if file in imports[other]}
        assert beside - {file}, f"{file} neither imports nor is imported by another file of the way"

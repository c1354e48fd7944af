"""The troubleshooting page quotes the tool: what it says can be met in the code, and every kind of trouble is there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.docs.links import anchors
from tt_cli.terminal.troubleshooting import BLANK, pattern, quotes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"


def text_of(node: ast.expr | None) -> str:
    """A string of the code; … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or BLANK for part in node.values)
    return ""


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "tt_cli").rglob("*.py")))


@cache
def said() -> frozenset[str]:
    """All sentences of the code; what is a number in a pattern is filled in too."""
    texts = {text_of(node) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return frozenset(text.replace(r"\d+", BLANK).replace("{}", BLANK) for text in texts if " " in text)


def kinds() -> set[str]:
    """The first arguments of Trouble(…), Diagnosis(…) and classify(…, …), and the kinds of hivemind's failures."""
    found = {"hivemind"}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_KINDS":
                assert isinstance(node.value, ast.Tuple)
                found |= {text_of(row.elts[1]) for row in node.value.elts if isinstance(row, ast.Tuple)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                if node.func.id in ("Trouble", "Diagnosis"):
                    found.add(text_of(node.args[0]))
                elif node.func.id == "classify" and len(node.args) > 1:
                    found.add(text_of(node.args[1]))
    return found - {""}


def test_every_kind_of_trouble_has_an_anchor() -> None:
    assert len(kinds()) > 15
    assert {kind.lower().replace(" ", "-") for kind in kinds()} <= anchors(PAGE)


def test_what_is_quoted_is_what_the_tool_says() -> None:
    found = quotes(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 80
    assert not [quote for quote in found if not any(map(pattern(quote).search, said()))]

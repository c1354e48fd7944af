"""The figures that pages quote: tables are made from docs/performance/figures.jsonl, and sentences agree with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import build_figures
from scripts.benchmarks import stored

RECORDS = stored.records()
NUMBER = r"−?\d+(?:,\d{3})*(?:\.\d+)?(?: %)?"
QUOTE = re.compile(rf"`([a-z]\w+)`(?: \|)? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
TABLE = re.compile(r"^\|[-| :]+\|\n((?:\|.*\n?)+)", re.MULTILINE)
MADE_FROM_FIGURES = [stored.ROOT / page for page in ("README.md", "docs/performance.md", "docs/challenges.md")]


def figures_by_key(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in records:
        for path, value in stored.numbers(record["figures"]):
            for key in set(re.split(r"[\[\]]+", path)):
                found.setdefault(key, []).append(value)
    return found


KNOWN = figures_by_key(RECORDS)


def unknown_quotes(text: str, known: dict[str, list[float]]) -> Iterator[str]:
    """Every number behind a figure's key in backticks that no record has, rounded as it is quoted."""
    for key, numbers in QUOTE.findall(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)):
        for number in re.findall(NUMBER, numbers) if key in known else []:
            plain = number.removesuffix(" %")
            digits, times = len(plain.partition(".")[2]), 100 if plain != number else 1
            if plain.replace("−", "-") not in {f"{value * times:,.{digits}f}" for value in known[key]}:
                yield f"`{key}` {number}"


def tables_by_hand(text: str) -> Iterator[str]:
    """Tables of figures that no template makes."""
    for body in TABLE.findall(re.sub(r"<!--.*?-->", "", build_figures.BLOCK.sub("", text), flags=re.DOTALL)):
        if re.search(r"\| [^|`]*\d", body):
            yield body


@pytest.mark.parametrize("page", build_figures.PAGES, ids=lambda page: page.name)
def test_every_page_is_made_from_the_stored_figures_and_quotes_no_others(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert build_figures.built(text, build_figures.by_id()) == text, "run python -m scripts.build_figures and commit"
    assert not list(unknown_quotes(text, KNOWN))


@pytest.mark.parametrize("page", MADE_FROM_FIGURES, ids=lambda page: page.name)
def test_no_table_of_figures_is_made_by_hand(page: Path) -> None:
    assert not list(tables_by_hand(page.read_text(encoding="utf-8")))


def test_a_figure_that_no_record_has_is_found() -> None:
    known = figures_by_key([{"figures": {"share": 0.0146, "rows": [{"sent_kb": 1086}, {"sent_kb": 74.2}]}}])
    right = "`share` 0.015, 1.5 % and 0.02; `share` of 7; `sent_kb` 1,086 and 74; | `sent_kb` | 74.2 | 80 |; `other` 3"
    assert list(unknown_quotes(right, known)) == ["`share` 0.02"]
    assert list(unknown_quotes("`sent_kb` 1,087\n<!-- `share` 9 -->", known)) == ["`sent_kb` 1,087"]
    made = "<!-- figures a-1\n| x |\n|---|\n| {share} |\n-->\n\n| x |\n|---|\n| 1 |\n"
    assert not list(tables_by_hand(made)) and list(tables_by_hand(made.partition("-->")[2])) == ["| 1 |\n"]


def test_every_record_says_what_was_run_where_and_when() -> None:
    assert len({record["id"] for record in RECORDS}) == len(RECORDS)
    for record in RECORDS:
        assert re.fullmatch(rf"{record['bench']}-\d+", record["id"])
        assert re.fullmatch(r"[0-9a-f]{7}", record["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
        assert record["machine"] and record["figures"] and ("dirty" in record or record["from"] == "docs")


def test_a_template_takes_figures_of_several_records_and_repeats_rows() -> None:
    records = {
        "a-1": {"share": 0.0146, "rows": {"x": {"loss": 1.5, "met": True}, "y": {"loss": None, "met": False}}},
        "b-1": {"share": -3 * 2**20, "rows": {"x": {"loss": 2.0}, "y": {"loss": "not finite"}}},
    }
    template = "{share:.1%} {b-1[share]:,.1fMiB} {rows[x][loss]}\neach rows: {row} {loss:.2f} {met} {b-1[loss]:.1f}"
    page = f"Text.\n\n<!-- figures a-1\n{template}\n-->\n\nold\nblock\n\nMore."
    made = build_figures.built(page, records)
    assert made == page.replace("old\nblock", "1.5 % −3.0 1.5\nx 1.50 yes 2.0\ny – no not finite")
    assert build_figures.built(made, records) == made
    with pytest.raises(KeyError):
        build_figures.built(page.replace("{share", "{shares"), records)


def test_a_table_of_several_records_has_the_newest_row_of_each_name_beside_those_of_another() -> None:
    records: dict[str, build_figures.Named] = {
        "a-1": {"rows": {"x": {"loss": 1.5, "noticed": "7 of 7: late"}, "y": {"loss": 2.0, "noticed": None}}},
        "a-2": {"rows": {"y": {"loss": 2.5, "noticed": "3 of 3: wrong"}, "z": {"loss": 3.0, "noticed": "–"}}},
        "b-1": {"rows": {"y": {"loss": 4.0}}},
    }
    made = build_figures.filled("each rows: {row} {loss:.1f} {noticed:.6} {b-1[loss]:.1f}", "a-1+a-2", records)
    assert made == "x 1.5 7 of 7 –\ny 2.5 3 of 3 4.0\nz 3.0 – –"
    with pytest.raises(KeyError):
        build_figures.filled("each rows: {b-1[lost]:.1f}", "a-1+a-2", records)

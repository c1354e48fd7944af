"""Which rows become examples: the paper's filters on a table of cases, and rows that cannot be right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pytest
from data.rows import code, row, run_on
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tt_cli.data.codes import to_column
from tt_cli.data.columns import ColumnRows
from tt_cli.data.examples import RowFilter
from tt_cli.data.row_rules import RowRules
from tt_cli.run import load_run

PASSES = [
    {},
    {"caption": "cat"},
    {"original_width": 200, "original_height": 100},
    {"original_width": 100, "original_height": 200},
    {"NSFW": ...},
    {"original_width": ...},
    {"caption": "été"},
    {"original_width": 640.0},
    {"code": ..., "code13": bytes(2)},
    {"code": None, "code13": bytes(2)},
]
FAILS = [
    ({"caption": None}, "no_caption"),
    ({"caption": ...}, "no_caption"),
    ({"caption": b"caf\xe9"}, "not_utf8"),
    ({"caption": 12}, "not_utf8"),
    ({"caption": "half a pair \ud83d"}, "not_utf8"),
    ({"NSFW": 3}, "wrong_type"),
    ({"NSFW": ["UNLIKELY"]}, "wrong_type"),
    ({"original_width": "640"}, "wrong_type"),
    ({"original_width": float("nan")}, "aspect_ratio"),
    ({"original_height": float("nan")}, "aspect_ratio"),
    ({"caption": " \n"}, "no_caption"),
    ({"caption": "ox"}, "short_caption"),
    ({"NSFW": "UNSURE"}, "nsfw"),
    ({"NSFW": "NSFW"}, "nsfw"),
    ({"NSFW": None}, "nsfw"),
    ({"original_width": 201, "original_height": 100}, "aspect_ratio"),
    ({"original_width": 100, "original_height": 201}, "aspect_ratio"),
    ({"original_width": 0}, "aspect_ratio"),
    ({"original_height": None}, "aspect_ratio"),
    ({"original_height": -480}, "aspect_ratio"),
    ({"code": None}, "code_width"),
    ({"code": ...}, "code_width"),
    ({"code": [1, 2, 3, 4]}, "code_width"),
    ({"code": code(1, 2, 3)}, "code_width"),
    ({"code": code(1, 2, 3, 4, 5)}, "code_width"),
    ({"code": code(1, 2, 3, 4)[:-1]}, "code_width"),
    ({"code": ..., "code13": code(1, 2, 3, 4)}, "code_width"),
    ({"code": ..., "code13": "text"}, "code_width"),
]


@pytest.mark.parametrize("changes", PASSES)
def test_rows_that_pass(changes) -> None:
    assert RowFilter(RowRules.of(run_on("any"))).reason(row(**changes)) is None


@pytest.mark.parametrize(("changes", "reason"), FAILS)
def test_rows_that_fail(changes, reason) -> None:
    row_filter = RowFilter(RowRules.of(run_on("any")))
    assert row_filter.reason(row(**changes)) == reason
    assert row_filter.sift([row(**changes), row()])[2].tolist() == [1]
    assert row_filter.counts.problems() == {reason: 1}


def test_the_run_file_sets_the_filters() -> None:
    run = run_on("any", min_caption_length=0, max_aspect_ratio=3.0, nsfw_allowed=["UNLIKELY", "UNSURE"])
    row_filter = RowFilter(RowRules.of(run))
    assert row_filter.reason(row(caption="x", NSFW="UNSURE", original_width=1440)) is None


def test_built_in_rows_pass_the_filters_but_not_the_checks() -> None:
    row_filter = RowFilter(RowRules.of(load_run("emoji")))
    good = row(caption="ox", NSFW="NSFW", original_width=9000, code=code(*range(64)))
    assert row_filter.reason(good) is None
    assert row_filter.reason({**good, "code": code(1)}) == "code_width"


@pytest.mark.parametrize("bad", [-1, 10, 32767])
def test_codes_out_of_range_are_left_out(bad: int) -> None:
    row_filter = RowFilter(RowRules.of(run_on("any")))
    rows = [row(), row(caption="bad", code=code(1, 2, bad, 4)), row(caption="last", code=code(0, 9, 9, 9))]
    captions, codes, _ = row_filter.sift(rows)
    assert captions == ["red apple", "last"]
    assert codes.dtype == np.int16
    assert codes.tolist() == [[1, 2, 3, 4], [0, 9, 9, 9]]
    assert (row_filter.counts["kept"], row_filter.counts["code_range"]) == (2, 1)
    assert row_filter.counts.in_words() == "3 rows: kept 2, code range 1"


def test_both_code_columns_are_read_beside_each_other() -> None:
    row_filter = RowFilter(RowRules.of(run_on("any")))
    known = np.array([[1, 2, 3, 4], [9, 8, 7, 6], [5, 5, 5, 5]], dtype=np.int16)
    packed = to_column("code13", known, 10)
    rows = [row(code=code(*known[0])), row(code=..., code13=packed[1]), row(code=code(*known[2]))]
    _, codes, _ = row_filter.sift(rows)
    assert codes.tolist() == known.tolist()


def test_sifting_tells_which_rows_are_good() -> None:
    row_filter = RowFilter(RowRules.of(run_on("any")))
    rows = [row(caption=None), row(caption="a cat"), row(code=code(1, 2, 3, 10)), row(caption="a dog"), {}]
    captions, codes, places = row_filter.sift(rows)
    assert captions == ["a cat", "a dog"]
    assert places.tolist() == [1, 3]
    assert codes.shape == (2, 4)
    assert row_filter.counts.in_words() == "5 rows: kept 2, code range 1, no caption 2"
    assert [len(part) for part in row_filter.sift([])] == [0, 0, 0]


LABELS = st.sampled_from(["UNLIKELY", "UNSURE", "LIKELY", None])
SIDES = st.one_of(st.integers(-5, 900), st.none())
ROWS = st.fixed_dictionaries(
    {
        "caption": st.one_of(st.sampled_from(["a cat", "ab", "", " \t ", "\u2003 \u2003", "ein Hund"]), st.none()),
        "NSFW": LABELS,
        "original_width": SIDES,
        "original_height": SIDES,
        "code": st.sampled_from([code(1, 2, 3, 4), code(9, 9, 9, 9), code(1, 2, 3, 10), code(-1, 2, 3, 4), b"abc"]),
    }
)
MOSTLY_GOOD = st.one_of(st.just(row(caption="a cat")), ROWS)


@given(
    st.lists(st.one_of(MOSTLY_GOOD, MOSTLY_GOOD, ROWS), min_size=1, max_size=12),
    st.sets(st.sampled_from(["NSFW", "original_width", "caption"])),
    st.booleans(),
    st.integers(0, 3),
)
@example([row(caption=" \t ")], set(), False, 0)
@settings(deadline=None)
def test_columns_are_sifted_as_rows_are(
    rows: list[dict[str, Any]], without: set[str], packed: bool, start: int
) -> None:
    """Whatever is odd about some of them; of a batch that begins in the middle of its buffers too."""
    rows = [{name: value for name, value in one.items() if name not in without} for one in rows]
    if packed:
        rows = [{**{k: v for k, v in one.items() if k != "code"}, "code13": one["code"][:2] or b"ab"} for one in rows]
    types = {
        "caption": pyarrow.string(),
        "NSFW": pyarrow.string(),
        "code": pyarrow.binary(),
        "code13": pyarrow.binary(),
    }
    schema = pyarrow.schema([(name, types.get(name, pyarrow.int64())) for name in rows[0]])
    columns = ColumnRows(pyarrow.RecordBatch.from_pylist(rows, schema=schema).slice(start))
    assert list(columns) == rows[start:] == [columns[place] for place in range(len(columns))]
    by_row, by_column = RowFilter(RowRules.of(run_on("any"))), RowFilter(RowRules.of(run_on("any")))
    expected, found = by_row.sift(rows[start:]), by_column.sift(columns)
    assert by_row.counts == by_column.counts
    assert expected[0] == found[0]
    assert expected[1].tolist() == found[1].tolist() and expected[2].tolist() == found[2].tolist()

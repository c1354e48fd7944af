"""The table: what is shown where there is too little room."""

from __future__ import annotations

from operator import itemgetter

from tt_cli.terminal.table import Column, table


def test_a_table_leaves_out_what_is_least_needed() -> None:
    columns: tuple[Column[list[str]], ...] = (
        Column("name", 4, 10, 3, itemgetter(0)),
        Column("extra", 5, 9, 1, itemgetter(1)),
        Column("value", 5, 9, 2, itemgetter(2), right=True),
    )
    rows = [["anna", "something", "12"], ["陈", "x", "1,000"]]
    assert [line.plain for line in table(columns, rows, 40)] == [
        "name  extra      value",
        "anna  something     12",
        "陈    x          1,000",
    ]
    assert [line.plain for line in table(columns, rows, 20)] == [
        "name  extra    value",
        "anna  someth…     12",
        "陈    x        1,000",
    ]
    assert [line.plain for line in table(columns, rows, 12)] == ["name  value", "anna     12", "陈    1,000"]

"""The charts: where dots and labels stand, that they fit, and that nothing breaks them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tt_cli.terminal.chart import LABEL, area_chart, figure, line_chart, log_ticks, nice_ticks, smoothed, sparkline


def rows(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def dots(row: str) -> int:
    return sum((ord(cell) - 0x2800).bit_count() for cell in row if 0x2800 <= ord(cell) < 0x2900)


def test_a_falling_curve_falls() -> None:
    shown = rows(line_chart([(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], LABEL + 9, 5))
    cells = [row[LABEL + 1 :].rstrip() for row in shown[:-1]]
    assert [len(cell) for cell in cells] == sorted(len(cell) for cell in cells)
    assert cells[0] and cells[0][0] != " " and cells[-1][-1] != " "
    assert shown[-1] == f"{'1':>{LABEL + 1}}{'4':>8}"


def test_a_logarithmic_axis_makes_an_exponential_a_straight_line() -> None:
    decaying = [(float(step), math.exp(-step)) for step in range(40)]
    linear, log = (rows(line_chart(decaying, 60, 11, log=log)) for log in (False, True))
    by_row = [dots(row) for row in log[:-1]]
    assert max(by_row) <= 2 * min(by_row)  # as many dots at every height
    assert dots(linear[-2]) > 10 * dots(linear[1])


def test_values_that_have_no_logarithm_are_left_out() -> None:
    assert line_chart([(1, 0.0), (2, -3.0)], 60, 10, log=True) == []
    assert line_chart([(1, 0.0), (2, 3.0)], 60, 10, log=True) != []


def test_one_point_and_equal_points_are_level() -> None:
    assert dots("".join(rows(line_chart([(5, 2.0)], 30, 4)))) == 1
    level = rows(line_chart([(1, 2.0), (9, 2.0)], 30, 4))
    assert sum(dots(row) > 0 for row in level) == 1
    assert any(row.lstrip().startswith("2 ┤") for row in level)


def test_many_points_are_a_mean_before_their_extremes() -> None:
    noisy = [(float(step), 5.0 + (-1) ** step) for step in range(1000)]
    lines = line_chart(noisy, 60, 12)
    bright = {row for row, line in enumerate(lines) for span in line.spans if span.style == "cyan"}
    dim = {row for row, line in enumerate(lines) for span in line.spans if span.style == "dim cyan"}
    assert len(bright) <= 2 and len(dim) > 9


def test_the_mean_of_neighbours() -> None:
    points = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 3.0)]
    assert smoothed(points, 1) == points
    assert [y for _, y in smoothed(points, 2)] == [1.5, 3.0, 4.0, 4.5]


def test_an_area_holds_its_value_until_the_next() -> None:
    shown = rows(area_chart([(0.0, 4.0), (50.0, 0.0), (100.0, 4.0)], LABEL + 41, 9))
    top, bottom = shown[0][LABEL + 1 :], shown[-2][LABEL + 1 :]
    assert set(top[:19]) == {"⠉"} and not top[22:38].strip()
    assert set(bottom[21:38]) == {"⣀"}
    assert shown[0].split()[0] == "4" and shown[-2].split()[0] == "0"


def test_a_low_area_is_filled() -> None:
    assert rows(area_chart([(0.0, 4.0), (100.0, 4.0)], LABEL + 11, 3))[0].endswith("⣿" * 10)


@pytest.mark.parametrize(
    ("low", "high", "most", "labels"),
    [
        (3.0, 8.1, 3, ["4", "6", "8"]),
        (3.21, 3.29, 4, ["3.22", "3.24", "3.26", "3.28"]),
        (0.0, 90_000.0, 3, ["0", "50,000"]),
        (5.0, 5.0, 3, []),
    ],
)
def test_round_ticks(low: float, high: float, most: int, labels: list[str]) -> None:
    assert [label for _, label in nice_ticks(low, high, most)] == labels


def test_ticks_of_steps_are_integers() -> None:
    assert [label for _, label in nice_ticks(1, 4, 9, whole=True)] == ["1", "2", "3", "4"]


def test_ticks_of_a_logarithmic_axis() -> None:
    assert [label for _, label in log_ticks(0.02, 30.0, 4)] == ["0.1", "1", "10"]
    assert [label for _, label in log_ticks(2.0, 12.0, 5)] == ["2", "5", "10"]
    assert [label for _, label in log_ticks(3.1, 3.9, 4)] == ["3.2", "3.4", "3.6", "3.8"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.0213, "0.0213"), (3.2149, "3.21"), (1204.4, "1,204"), (1e6, "1e+06"), (4.0, "4")]
)
def test_figures_fit_their_column(value: float, text: str) -> None:
    assert figure(value) == text


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.tuples(st.floats(0, 1e15), NUMBERS), max_size=50), st.integers(0, 90), st.integers(0, 30), st.booleans()
)
def test_no_points_break_a_chart_or_its_frame(
    points: list[tuple[float, float]], width: int, height: int, log: bool
) -> None:
    points = sorted(points, key=lambda point: point[0])
    for lines in (line_chart(points, width, height, log=log), area_chart(points, width, height)):
        assert len(lines) in (0, height)
        assert all(cell_len(line.plain) <= width and "\n" not in line.plain for line in lines)


def test_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([], 8) == ""
    assert sparkline([1.0, math.nan, math.inf, 1e300, 2.0], 8) == "▁█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(sparkline(list(range(1000)), 33)) == 33

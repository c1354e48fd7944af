"""Codes as bytes and back: nothing is lost, and no bit is wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tt_cli.data.codes import bits_per_code, column_bytes, from_column, to_column


@st.composite
def coded(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Codes (b, n) int16 and the size of a codebook that they fit."""
    codebook = draw(st.one_of(st.integers(2, 2**15), st.sampled_from([2, 256, 257, 1024, 8191, 8192, 2**15])))
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 70)))
    return draw(arrays(np.int16, shape, elements=st.integers(0, codebook - 1))), codebook


@given(coded(), st.sampled_from(["code", "code13"]))
def test_round_trip(given_codes: tuple[np.ndarray, int], column: str) -> None:
    codes, codebook = given_codes
    rows = to_column(column, codes, codebook)
    assert all(len(row) == column_bytes(column, codes.shape[1], codebook) for row in rows)
    again = from_column(column, rows, codes.shape[1], codebook)
    assert again.dtype == np.int16
    assert np.array_equal(again, codes)


@given(coded())
def test_bits_are_where_the_format_says(given_codes: tuple[np.ndarray, int]) -> None:
    codes, codebook = given_codes
    bits = bits_per_code(codebook)
    for row, string in zip(codes, to_column("code13", codes, codebook), strict=True):
        assert int.from_bytes(string, "little") == sum(int(code) << (bits * i) for i, code in enumerate(row))


@pytest.mark.parametrize(
    ("codebook", "bits"), [(2, 1), (3, 2), (256, 8), (257, 9), (1024, 10), (8192, 13), (2**15, 15)]
)
def test_no_more_bits_than_needed(codebook: int, bits: int) -> None:
    assert bits_per_code(codebook) == bits


def test_a_published_row() -> None:
    codes = np.arange(1024, dtype=np.int64)[None] * 8
    assert column_bytes("code13", 1024, 8192) == len(to_column("code13", codes, 8192)[0]) == 1664
    assert to_column("code", codes, 8192)[0] == codes.astype("<i2").tobytes()


@pytest.mark.parametrize("column", ["code", "code13"])
def test_another_width_is_refused(column: str) -> None:
    good = to_column(column, np.zeros((1, 64), dtype=np.int16), 1024)[0]
    for bad in (good[:-1], good + b"\0", b""):
        with pytest.raises(ValueError, match=f"a row has {len(bad)} bytes of codes, not {len(good)}"):
            from_column(column, [good, bad], 64, 1024)


@pytest.mark.parametrize("column", ["code", "code13"])
@pytest.mark.parametrize("bad", [-1, 1000])
def test_codes_out_of_range_are_not_written(column: str, bad: int) -> None:
    with pytest.raises(ValueError, match="not all below 1000"):
        to_column(column, np.array([[1, bad]]), 1000)


def test_no_rows() -> None:
    assert to_column("code13", np.zeros((0, 64), dtype=np.int16), 8192) == []
    assert from_column("code13", [], 64, 8192).shape == (0, 64)

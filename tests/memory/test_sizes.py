"""Amounts of memory, read and shown."""

from __future__ import annotations

import pytest

from tt_cli.errors import UsageError
from tt_cli.memory import parse_size, shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("7.5 GiB", 15 * 2**29),
        (" 512MB ", 512 * 10**6),
        (".5g", 2**29),
        ("1tb", 10**12),
        ("8000000000", 8 * 10**9),
        ("8000000b", 8 * 10**6),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "8 GBytes", "-1GB", "8,5GB", "1e9", "0", "0GB", "8", "1023k", "nan", "inf", "٨GB", "9" * 30]
)
def test_anything_else_is_one_line_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 8GB") as caught:
        parse_size(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "words"), [(2**30, "1.0 GiB"), (123.4 * 2**30, "123 GiB"), (640 * 2**20, "640 MiB"), (4096, "4 KiB")]
)
def test_sizes_are_shown(size: float, words: str) -> None:
    assert shown(size) == words

"""Shards of every container: what is written is read again, and a damage costs what lies behind it, no more."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data.rows import read_rows, row, tar
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.full_disk import full_after

from tt_cli.data import shard_format
from tt_cli.data.shard_format import CONTAINERS, stored_bytes, write_shard
from tt_cli.errors import TTError

Row = dict[str, Any]

captions = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
sizes = st.integers(0, 2**40)


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Rows of one kind: with or without a label and sizes, with either column of codes."""
    columns: dict[str, st.SearchStrategy[Any]] = {"caption": captions}
    if draw(st.booleans()):
        columns["NSFW"] = st.sampled_from(["UNLIKELY", "UNSURE", None])
    if draw(st.booleans()):
        columns |= {"original_width": sizes, "original_height": sizes}
    columns[draw(st.sampled_from(["code", "code13"]))] = st.binary(max_size=60)
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=8))


def numbered(count: int) -> list[Row]:
    return [row(caption=f"row {i}", code=os.urandom(64)) for i in range(count)]


def read(content: bytes, name: str, skip: int = 0) -> list[Row]:
    return list(read_rows(io.BytesIO(content), name, skip))


def read_until_damage(content: bytes, name: str) -> tuple[list[Row], str]:
    rows = []
    try:
        for row in read_rows(io.BytesIO(content), name):
            rows.append(row)
    except TTError as error:
        return rows, str(error)
    return rows, ""


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=30)
@given(rows=tables(), data=st.data())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, container: str, rows: list[Row], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("shards") / f"train-0{container}"
    facts = write_shard(path, rows)
    content = path.read_bytes()
    assert (facts.name, facts.rows, facts.bytes) == (path.name, len(rows), len(content))
    assert facts.sha256 == hashlib.sha256(content).hexdigest()
    assert os.listdir(path.parent) == [path.name]
    skip = data.draw(st.integers(0, len(rows) + 1))
    assert read(content, path.name, skip) == rows[skip:]
    assert write_shard(path, rows) == facts, "the same rows give the same bytes"


@pytest.mark.parametrize("container", CONTAINERS)
def test_from_any_row_across_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str) -> None:
    monkeypatch.setattr(shard_format, "GROUP_ROWS", 7)
    rows = numbered(30)
    path = tmp_path / f"a{container}"
    write_shard(path, rows)
    for skip in range(32):
        assert read(path.read_bytes(), path.name, skip) == rows[skip:]


@pytest.mark.parametrize("container", [".tar", ".jsonl.br"])
def test_streams_need_no_seek(tmp_path: Path, container: str) -> None:
    rows = numbered(50)
    write_shard(tmp_path / f"a{container}", rows)
    reading, writing = os.pipe()
    content = (tmp_path / f"a{container}").read_bytes()
    if os.fork() == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as sink:
            sink.write(content)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as source:
        assert list(read_rows(source, f"a{container}")) == rows
    os.wait()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_a_shard_that_just_ends_is_named_after_its_good_rows(tmp_path: Path, container: str, part: float) -> None:
    rows = numbered(200)
    path = tmp_path / f"a{container}"
    write_shard(path, rows)
    content = path.read_bytes()
    end = int(len(content) * part) if container != ".tar" or part < 0.9 else int(len(content) * part) - 10240
    found, words = read_until_damage(content[:end], path.name)
    assert found == rows[: len(found)]
    assert words.startswith(f"the shard {path.name} cannot be read to its end (")
    assert "\n" not in words
    if container == ".tar":
        assert len(found) >= int(190 * part) - 12


def test_a_damaged_page_costs_its_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_format, "GROUP_ROWS", 50)
    rows = numbered(200)
    path = tmp_path / "a.parquet"
    write_shard(path, rows)
    content = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(4)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    found, words = read_until_damage(bytes(content), path.name)
    assert found == rows[:100]
    assert "a.parquet cannot be read to its end" in words


def test_a_tar_that_ends_between_two_files_has_no_end(tmp_path: Path) -> None:
    rows = numbered(3)
    path = tmp_path / "a.tar"
    write_shard(path, rows)
    found, words = read_until_damage(path.read_bytes()[: 2 * 4 * 512], path.name)
    assert found == rows[:1], "the second may have had more files"
    assert "cannot be read to its end" in words


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("code", [[1, 2]], "its column code is list<"),
        ("code", ["text"], "its column code is string, not bytes"),
        ("code13", [7], "its column code13 is int64, not bytes"),
        ("caption", [7], "its column caption is int64, not text"),
        ("original_width", ["wide"], "its column original_width is string, not whole numbers"),
    ],
)
def test_columns_of_another_type_are_named(column: str, values: list[Any], words: str) -> None:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: values}), file)
    with pytest.raises(TTError, match="the shard x.parquet is of no use") as caught:
        read(file.getvalue(), "x.parquet")
    assert words in str(caught.value)


def test_other_types_of_the_same_meaning_are_read() -> None:
    table = pyarrow.table(
        {
            "caption": pyarrow.array(["a", "a"]).dictionary_encode(),
            "NSFW": pyarrow.array([None, None], pyarrow.null()),
            "original_width": pyarrow.array([1.0, 2.0]),
            "code": pyarrow.array([b"12", b"34"], pyarrow.large_binary()),
            "extra": [1, 2],
        }
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    expected = {"caption": "a", "NSFW": None, "original_width": 1.0, "code": b"12"}
    assert read(file.getvalue(), "x.parquet") == [expected, {**expected, "original_width": 2.0, "code": b"34"}]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_a_caption_that_is_not_utf8_costs_no_other_row_in_parquet(kind: pyarrow.DataType) -> None:
    raw = pyarrow.array(
        [b"red", b"\xff\xfe", None], pyarrow.large_binary() if "large" in str(kind) else pyarrow.binary()
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"caption": raw.view(kind), "code": [b"1", b"2", b"3"]}), file)
    assert [row["caption"] for row in read(file.getvalue(), "x.parquet")] == ["red", b"\xff\xfe", None]


def brotli(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "brotli") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def test_bad_lines_keep_their_numbers_and_cost_no_other_row() -> None:
    good = b'{"caption": "red", "code": "%s", "other": 1}' % base64.b64encode(b"12")
    lines = [
        good,
        b"{not JSON",
        b"[1, 2]",
        b"",
        b'{"caption": "caf\xe9", "code": "!!"}',
        b'{"caption": "\\ud800"}',
        '{"caption": "日本"}'.encode(),
        b"[" * 100_000,
        good,
    ]
    assert read(brotli(b"\n".join(lines)), "x.jsonl.br") == [
        {"caption": "red", "code": b"12"},
        {},
        {},
        {},
        {"caption": b"caf\xe9", "code": "!!"},
        {"caption": "\ud800"},
        {"caption": "日本"},
        {},
        {"caption": "red", "code": b"12"},
    ]


def test_a_line_without_end_is_not_held() -> None:
    content = brotli(b"{}\n" + b"a" * (64 << 20))
    assert len(content) < 1000
    tracemalloc.start()
    rows, words = read_until_damage(content, "x.jsonl.br")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert (rows, words) == ([{}], "the shard x.jsonl.br is of no use: it has a line of over 1048576 bytes")


def test_tars_of_others() -> None:
    content = tar(
        [
            ("folder/", b""),
            ("folder/a.JSON", json.dumps({"original_width": 3, "code": "no"}).encode()),
            ("folder/a.txt", b"red apple\n"),
            ("folder/a.code", b"12"),
            ("folder/b.code", b"34"),
            ("folder/b.txt", b"caf\xe9"),
            ("folder/c.json", b"{broken"),
            ("folder/d.jpg", b"x" * 5000),
            ("e.json", json.dumps({"caption": "pear", "NSFW": "UNLIKELY"}).encode()),
            ("e.txt", b"not this"),
            ("e.code13", b"56"),
            ("f.code", b"x" * (2 << 20)),
        ]
    )
    assert read(content, "x.tar") == [
        {"original_width": 3, "caption": "red apple", "code": b"12"},
        {"caption": b"caf\xe9", "code": b"34"},
        {},
        {},
        {"caption": "pear", "NSFW": "UNLIKELY", "code13": b"56"},
        {"code": b""},
    ]


def extended(size: int) -> bytes:
    """The header of a tar that says: so many bytes of names and their like follow."""
    member = tarfile.TarInfo("PaxHeaders/a")
    member.type, member.size = tarfile.XHDTYPE, size
    return member.tobuf(tarfile.GNU_FORMAT)


SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (extended(64 << 20) + bytes(64 << 20), "a name or its like of 67,108,864 bytes"),
        ((extended(11) + b"11 foo=bar\n".ljust(512, b"\0")) * 5000, "maximum recursion depth exceeded"),
        (extended(44) + SPARSE.ljust(512, b"\0") + tarfile.TarInfo("a").tobuf() + bytes(1024), "not enough values"),
    ],
    ids=["size", "depth", "holes"],
)
def test_a_tars_headers_take_no_memory_and_end_no_reader(content: bytes, words: str) -> None:
    tracemalloc.start()
    rows, damage = read_until_damage(content, "x.tar")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert not rows and words in damage and "\n" not in damage


def test_names_that_are_no_shards_are_refused() -> None:
    with pytest.raises(TTError, match=r"cannot read x.zip: a shard's name ends in .parquet, .tar, .jsonl.br"):
        read_rows(io.BytesIO(), "x.zip")


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path, container: str) -> None:
    path = tmp_path / f"a{container}"
    write_shard(path, numbered(3))
    before = path.read_bytes()
    with (
        pytest.raises(TTError, match=rf"cannot write .*a{container}: File too large; raise the limit"),
        full_after(20_000),
    ):
        write_shard(path, numbered(3000))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_no_space_is_said_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TTError, match="No space left on device; free some space and start again, it goes on from here"):
        write_shard(tmp_path / "a.parquet", numbered(3))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("width", [128, 2048])
def test_the_size_is_foretold(tmp_path: Path, container: str, width: int) -> None:
    rows = [{**row, "code": os.urandom(width)} for row in numbered(2000)]
    facts = write_shard(tmp_path / f"a{container}", rows)
    assert 0.8 < facts.bytes / sum(stored_bytes(row, container) for row in rows) < 1.25

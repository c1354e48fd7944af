"""Folders, tables and tars give the same pictures in the same order, from any number on; a loop of links ends."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data.rows import bomb, png, tar

from tt_cli.data.build.picture_sources import CaptionedPicture, DamagedUnit, PictureSource, open_source, picture_of
from tt_cli.data.folder_walk import files_below
from tt_cli.errors import TTError, UsageError


def everything(source: PictureSource) -> list[CaptionedPicture]:
    """All pictures; every unit is also read from each number on, which must give the same."""
    found = []
    for unit in range(len(source.units)):
        whole = list(source.read(unit, 0))
        for skip in range(len(whole) + 2):
            assert list(source.read(unit, skip)) == whole[skip:]
        found += whole
    return found


def test_a_folder_with_captions_beside(tmp_path: Path) -> None:
    for name, caption in {"b": b"pear\n", "sub/a": "Äpfel".encode(), "a": b"caf\xe9", "c": None}.items():
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png())
        if caption is not None:
            path.with_suffix(".txt").write_bytes(caption)
    (tmp_path / ".hidden.png").write_bytes(png())
    (tmp_path / "notes.md").write_text("no picture")
    source = open_source(str(tmp_path))
    assert source.total == 4
    assert [(picture.name, picture.caption) for picture in everything(source)] == [
        ("a.png", b"caf\xe9"),
        ("b.png", "pear"),
        ("c.png", None),
        ("sub/a.png", "Äpfel"),
    ]


def test_a_table_of_kilobytes_does_not_become_gigabytes(tmp_path: Path) -> None:
    bomb(tmp_path / "a.parquet")
    with pytest.raises(DamagedUnit, match=r"a\.parquet cannot be read to its end: it takes over a gigabyte"):
        for _ in open_source(str(tmp_path)).read(0, 0):
            pass


def test_loops_of_links_end_and_linked_folders_are_entered_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.png").write_bytes(png())
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/a.png").write_bytes(png())
    (folder / "deep/up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "other").symlink_to(tmp_path / "elsewhere")
    (folder / "again").symlink_to(tmp_path / "elsewhere")
    (folder / "gone.png").symlink_to(tmp_path / "nothing")
    names = [str(path.relative_to(folder)) for path in files_below(folder, lambda error: None)]
    assert sum(name.endswith("x.png") for name in names) == 1
    assert [name for name in names if not name.endswith("x.png")] == ["deep/a.png", "gone.png", "self"]


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_tables_beside_pictures(tmp_path: Path, ending: str) -> None:
    rows = rows_of(
        file_name=["x/0.png", "1.png", "2.png", "3.png", "4.png"],
        TEXT=["red", "grün, gelb", 'a "quoted"\nline', "", "五"],
        NSFW=["UNLIKELY", "UNSURE", "NSFW", "UNLIKELY", "UNLIKELY"],
        WIDTH=[10, 20, 30, 40, 50],
        HEIGHT=["5", "5", "5", "?", "5"],
    )
    write_table(tmp_path / f"captions{ending}", rows)
    for name in (str(tmp_path), str(tmp_path / f"captions{ending}")):
        found = everything(open_source(name))
        assert [picture.caption for picture in found] == [row["TEXT"] for row in rows]
        assert [picture.content for picture in found] == [tmp_path / row["file_name"] for row in rows]
        assert found[0].fields == {"NSFW": "UNLIKELY", "original_width": 10, "original_height": 5}
        assert found[3].fields["original_height"] == 0
        assert found[4].name == f"captions{ending}:4"


def test_parquet_with_pictures_inside(tmp_path: Path) -> None:
    embedded = [{"bytes": png(0), "path": "a.png"}, {"bytes": None, "path": "b.png"}, None]
    write_table(tmp_path / "a.parquet", rows_of(image=embedded, caption=["a", "b", "c"]))
    write_table(tmp_path / "b.parquet", rows_of(jpg=[png(1)], text=["d"]))
    found = everything(open_source(str(tmp_path)))
    assert [picture.content for picture in found] == [png(0), tmp_path / "b.png", None, png(1)]
    assert [picture.caption for picture in found] == list("abcd")
    assert all(picture.fields == {} for picture in found)


def test_parquet_whose_rows_are_all_one_group(tmp_path: Path) -> None:
    """As pandas writes it: a group of 10,000 pictures has a gigabyte, of which a part is needed at a time."""
    count, size = 5_000, 1 << 16
    offsets = pyarrow.py_buffer(np.arange(0, (count + 1) * size, size, dtype=np.int32))
    content = pyarrow.py_buffer(np.repeat(np.arange(count, dtype=np.int32), size // 4))
    pictures = pyarrow.Array.from_buffers(pyarrow.binary(), count, [None, offsets, content])
    table = pyarrow.table({"image": pictures, "caption": [str(number) for number in range(count)]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **options)
    code = """if True:
        import sys
        from tt_cli.data import memory_bound
        from tt_cli.data.build.picture_sources import open_source
        memory_bound.MOST = 1 << 28
        for number, picture in enumerate(open_source(sys.argv[1]).read(0, 0)):
            assert picture.content == number.to_bytes(4, "little") * (1 << 14)
        print(number)
        """
    # In a process of its own, whose memory was never pyarrow's.
    command = [sys.executable, "-c", code, str(tmp_path / "a.parquet")]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.stdout == f"{count - 1}\n", read.stderr
    (tmp_path / "a.parquet").unlink()


def test_bad_lines_cost_no_other_row(tmp_path: Path) -> None:
    lines = [
        b'{"caption": "a", "path": "a.png"}',
        b"{nonsense",
        b"[1]",
        b'{"caption": "caf\xe9", "path": "b.png"}',
        b"",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = everything(open_source(str(tmp_path / "a.jsonl")))
    assert [picture.caption for picture in found] == ["a", None, None, b"caf\xe9"]
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbfcaption,path\na,a.png\nonly\ncaf\xe9,b.png\na,b,c,d\n")
    found = everything(open_source(str(tmp_path / "b.csv")))
    assert [picture.caption for picture in found] == ["a", "only", b"caf\xe9", "a"]
    assert found[1].content is None


def test_webdataset_tars(tmp_path: Path) -> None:
    (tmp_path / "00.tar").write_bytes(
        tar(
            [
                ("a.jpg", png(1)),
                ("a.txt", b"red"),
                ("a.json", json.dumps({"caption": "not this", "NSFW": "UNSURE", "original_width": 9}).encode()),
                ("b.json", json.dumps({"text": "blue"}).encode()),
                ("b.cls", b"7"),
                ("b.png", png(2)),
            ]
        )
    )
    (tmp_path / "01.tar").write_bytes(tar([("c.json", b"{broken"), ("c.png", png(3)), ("d.txt", b"alone")]))
    found = everything(open_source(str(tmp_path)))
    assert [(picture.name, picture.caption, picture.content) for picture in found] == [
        ("00.tar/a", "red", png(1)),
        ("00.tar/b", "blue", png(2)),
        ("01.tar/c", None, png(3)),
        ("01.tar/d", "alone", None),
    ]
    assert found[0].fields == {"NSFW": "UNSURE", "original_width": 9}


@pytest.mark.parametrize("size", [10**20, 1e30, -3, "9" * 5000, float("nan"), [1]])
def test_a_size_that_no_picture_has_is_as_if_there_were_none(size: Any) -> None:
    """No shard could hold some of these."""
    assert picture_of("a", {"caption": "a", "width": size}, None).fields == {"original_width": 0}


def good_until_damage(source: PictureSource, unit: int) -> tuple[list[CaptionedPicture], str]:
    found = []
    try:
        for picture in source.read(unit, 0):
            found.append(picture)
    except DamagedUnit as error:
        return found, str(error)
    return found, ""


def test_damaged_files_give_what_comes_before(tmp_path: Path) -> None:
    content = tar([(f"{i}.{kind}", png(i) if kind == "png" else b"text") for i in range(9) for kind in ("png", "txt")])
    (tmp_path / "a.tar").write_bytes(content[: 6 * 2048 + 300])
    found, words = good_until_damage(open_source(str(tmp_path / "a.tar")), 0)
    assert 4 <= len(found) <= 6
    assert "a.tar cannot be read to its end" in words and "\n" not in words
    write_table(tmp_path / "a.parquet", rows_of(image=[png(i) for i in range(9)], caption=["x"] * 9))
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    found, words = good_until_damage(open_source(str(tmp_path / "a.parquet")), 0)
    assert found == [] and "a.parquet cannot be read to its end" in words


def test_a_disk_that_is_unplugged_ends_the_work_and_not_the_pictures(tmp_path: Path) -> None:
    """Else all that was on it would be left out for good, as damaged files or pictures without a caption."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.png").write_bytes(png())
    pictures = open_source(str(folder)).read(0, 0)
    next(pictures)
    (folder / "b.png").unlink()
    assert next(pictures).name == "b.png"  # for the decoder to miss
    for number in range(2):
        (folder / f"{number}.tar").write_bytes(tar([("a.png", png())]))
    tars = open_source(str(folder))
    assert len(list(tars.read(0, 0))) == 1
    (folder / "all.csv").write_text("file_name,caption\na.png,a\nb.png,b\nc.png,c\n")
    rows = open_source(str(folder / "all.csv")).read(0, 0)
    assert [next(rows).caption, next(rows).caption] == ["a", "b"]
    folder.rename(tmp_path / "unplugged")
    for lost, name in ((pictures, "c.png"), (tars.read(1, 0), "1.tar"), (rows, "all.csv")):
        with pytest.raises(TTError, match=f"{name}: it is not there any more; bring its disk back") as caught:
            next(lost)
        assert not isinstance(caught.value, DamagedUnit)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing-here", "there is no such folder or file, and no data set on the Hub is called so"),
        ("~no-such-user/x/y", "there is no such folder or file"),
        ("empty", "there is nothing to encode in empty: no tars"),
        ("a.zip", "it is no folder and ends in none of .tar, .parquet, .jsonl, .csv"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zip").touch()
    with pytest.raises(UsageError) as caught:
        open_source(name)
    assert words in str(caught.value)

"""Sources of pictures with captions: a folder, a table of captions, WebDataset tars, a data set on the Hub.

A source is a list of units (files, shards), each of which gives its pictures in the same order every time; so a place
in it is a unit and a number, and work goes on from there. Names of columns are taken in any case.

Notable:
- a damaged unit gives the pictures before the damage, then raises DamagedUnit; a bad row is a Picture all the same;
- folders are walked in the order of names; each is entered once, so a loop of links ends.
"""

from __future__ import annotations

import csv
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tt_cli.data.build.picture_decoding import FORMATS
from tt_cli.data.columns import column_batches, json_object, text_or_bytes, unescaped
from tt_cli.data.folder_walk import files_below
from tt_cli.data.memory_bound import bounded
from tt_cli.data.shard_format import LARGEST_MEMBER, tar_samples
from tt_cli.errors import TTError, UsageError, first_line
from tt_cli.hub.dataset_errors import dataset_errors
from tt_cli.run.sections import HUB_NAME

PICTURES = tuple(itertools.chain(*FORMATS.values()))
MANY = (".tar", ".parquet", ".jsonl", ".csv")  # files with many pictures in each: tars, and tables
CAPTION = ("caption", "text")
EMBEDDED = ("image", "picture", "jpg", "jpeg", "png", "webp")
NO_DATA_SET = "the Hub has no such data set, or it is private; check the name"
GONE = "it is not there any more; bring its disk back and start again, it goes on from here"
MOST_IN_TAR = 1 << 28  # bytes of one file in a tar
BESIDE = ("file_name", "file", "path", "filename")  # paths from the table's folder
FIELDS = {  # of a row, by the columns that may hold them
    "NSFW": ("nsfw",),
    "original_width": ("original_width", "width"),
    "original_height": ("original_height", "height"),
}


@dataclass(frozen=True)
class CaptionedPicture:
    """One picture of a source, not yet decoded."""

    name: str  # for the list of broken ones
    caption: Any  # bytes where it is not UTF-8
    content: bytes | Path | None  # the file's bytes or its path
    fields: Mapping[str, Any] = field(default_factory=dict)  # those of FIELDS that the source knows


class DamagedUnit(TTError):
    """A file of a source cannot be read further; the others can."""


@dataclass(frozen=True)
class PictureSource:
    """Units, by their names, and the way to read one: its pictures from a number on. Raises DamagedUnit, TTError.

    total: pictures in all, where that is known without reading them.
    """

    units: Sequence[str]
    read: Callable[[int, int], Iterator[CaptionedPicture]]
    total: int | None = None


def open_source(name: str, *, split: str = "train", revision: str | None = None) -> PictureSource:
    """The source of this name: a folder, a .tar, .parquet, .jsonl or .csv file, or OWNER/NAME on the Hub.

    A folder with tars in it is those tars; else one with tables beside the pictures is those tables; else captions
    are in NAME.txt beside each picture. Raises UsageError where there is nothing of the kind.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() in MANY:
            return _files([path])
        raise UsageError(f"cannot encode {name}: it is no folder and ends in none of {', '.join(MANY)}")
    if HUB_NAME.fullmatch(name) and not name.startswith("."):
        return _hub(name, split, revision)
    raise UsageError(f"cannot encode {name}: there is no such folder or file, and no data set on the Hub is called so")


def _folder(path: Path) -> PictureSource:
    def on_unreadable(error: OSError) -> None:
        if error.filename == str(path):  # others are passed over
            raise UsageError(f"cannot read the folder {path}: {error.strerror or error}") from error

    files = files_below(path, on_unreadable)
    for ending in MANY:
        found = [file for file in files if file.suffix.lower() == ending]
        if many := [file for file in found if ending == ".tar" or file.parent == path]:
            return _files(many)
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    if not pictures:
        raise UsageError(f"there is nothing to encode in {path}: no tars, no {', '.join(MANY[1:])}, no pictures")

    def read(unit: int, skip: int) -> Iterator[CaptionedPicture]:
        for picture in pictures[skip:]:
            if not any(map(os.path.lexists, (picture, pictures[0], pictures[-1]))):  # one of them may be removed
                raise TTError(f"cannot read {picture}: {GONE}")
            yield CaptionedPicture(str(picture.relative_to(path)), _caption_beside(picture), picture)

    return PictureSource([path.name], read, len(pictures))


def _caption_beside(path: Path) -> str | bytes | None:
    try:
        with path.with_suffix(".txt").open("rb") as file:
            return text_or_bytes(file.read(LARGEST_MEMBER).strip(), "utf-8-sig")
    except OSError:
        return None


def _files(files: Sequence[Path]) -> PictureSource:
    pictures = _tar_pictures if files[0].suffix.lower() == ".tar" else _table_pictures

    def read(unit: int, skip: int) -> Iterator[CaptionedPicture]:
        import pyarrow

        try:
            for picture in pictures(files[unit], skip):
                if isinstance(picture.content, Path) and not any(map(os.path.lexists, (picture.content, files[unit]))):
                    raise TTError(GONE)  # a table that is still open is read to its end
                yield picture
        except (TTError, pyarrow.ArrowException, MemoryError, csv.Error, OSError, UnicodeDecodeError) as error:
            if not os.path.lexists(files[unit]):
                raise TTError(f"cannot read {files[unit]}: {GONE}") from error
            raise DamagedUnit(f"{files[unit]} cannot be read to its end: {first_line(error)}") from error

    return PictureSource([path.name for path in files], read)


def _tar_pictures(path: Path, skip: int) -> Iterator[CaptionedPicture]:
    """KEY.jpg (or another picture) with KEY.txt, or KEY.json with the columns."""

    def wanted(kind: str) -> bool:
        return kind in ("json", "txt") or f".{kind}" in PICTURES

    with path.open("rb") as file:
        for members in itertools.islice(tar_samples(file, path.name, wanted, MOST_IN_TAR), skip, None):
            row = json_object(members.get("json", b"").decode("utf-8", "surrogateescape"))
            if "txt" in members:
                row = {key: value for key, value in row.items() if key.lower() not in CAPTION}
                row["caption"] = text_or_bytes(members["txt"].strip(), "utf-8-sig")
            content = next((members[kind] for kind in members if f".{kind}" in PICTURES), None)
            yield picture_of(f"{path.name}/{members[''].decode('utf-8', 'replace')}", {**row, "image": content}, None)


def _table_pictures(path: Path, skip: int) -> Iterator[CaptionedPicture]:
    """Rows of CSV, JSON lines or parquet: pictures in a column of bytes, or as paths beside the table."""
    for number, row in enumerate(_rows(path, skip), skip):
        yield picture_of(f"{path.name}:{number}", row, path.parent)


def _rows(path: Path, skip: int) -> Iterator[Mapping[str, Any]]:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as table:  # no group whole
            wanted = {*CAPTION, *EMBEDDED, *BESIDE, *(name for names in FIELDS.values() for name in names)}
            columns = [name for name in table.schema_arrow.names if name.lower() in wanted]
            for batch in column_batches(table, columns, 64, skip):
                yield from batch
        return
    with path.open("rb") as file:
        pieces = iter(functools.partial(file.readline, MOST_IN_TAR), b"")  # of a file without lines, not all at once
        lines = (line.decode("utf-8", "surrogateescape") for line in pieces)
        if path.suffix.lower() == ".csv":
            csv.field_size_limit(LARGEST_MEMBER)
            rows: Iterator[Any] = csv.DictReader(line.removeprefix("\ufeff") for line in lines)
        else:
            rows = map(json_object, lines)
        for row in itertools.islice(rows, skip, None):
            yield {str(key): unescaped(value) if isinstance(value, str) else value for key, value in row.items()}


def picture_of(name: str, row: Mapping[str, Any], folder: Path | None) -> CaptionedPicture:
    """A row of a table as a Picture; paths are taken from `folder`, where there is one.

    A column of pictures holds bytes or, as `datasets` has it, {"bytes", "path"}.
    """
    lower = {key.lower(): value for key, value in row.items()}
    caption = next((lower[column] for column in CAPTION if column in lower), None)
    fields = {}
    for key, columns in FIELDS.items():
        if (column := next((column for column in columns if column in lower), None)) is not None:
            fields[key] = lower[column] if key == "NSFW" else _whole(lower[column])
    return CaptionedPicture(name, caption, _content(lower, folder), fields)


def _content(row: Mapping[str, Any], folder: Path | None) -> bytes | Path | None:
    for column in (*EMBEDDED, *BESIDE):
        value = row.get(column)
        if column in EMBEDDED and isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if column in EMBEDDED and isinstance(value, bytes):
            return value
        if isinstance(value, str) and value and folder is not None:
            return folder / value
    return None


def _whole(value: Any) -> int:
    """A size in pixels, 0 for what is none."""
    with suppress(TypeError, ValueError, OverflowError):
        if 0 < (size := int(value)) < 1 << 31:  # what no picture has a column of a shard may not hold
            return size
    return 0


def _hub(name: str, split: str, revision: str | None) -> PictureSource:
    """A data set on the Hub, streamed by `datasets`: nothing of it is kept on this machine. Its units are its shards.

    Raises UsageError without pictures or captions.
    """
    import datasets

    reading = functools.partial(dataset_errors, f"cannot read the data set {name}", NO_DATA_SET, DamagedUnit)
    with reading():
        data_set = datasets.load_dataset(name, revision=revision, split=split, streaming=True)
        columns = data_set.column_names or list(next(iter(data_set), {}))
    pictures = [column for column in columns if column.lower() in EMBEDDED]
    if not (pictures and any(column.lower() in CAPTION for column in columns)):
        raise UsageError(
            f"cannot encode {name}: it needs a column of pictures ({', '.join(EMBEDDED)}) and one of captions "
            f"({', '.join(CAPTION)}); it has {', '.join(columns) or 'no row'}"
        )
    features = data_set.features or {}
    for column in pictures:
        if isinstance(features.get(column), datasets.Image):
            data_set = data_set.cast_column(column, datasets.Image(decode=False))
    which = f"{name}{f'@{revision}' if revision else ''}{'' if split == 'train' else f' {split}'}"
    units = [f"{which} shard {number}" for number in range(data_set.num_shards)]

    def read(unit: int, skip: int) -> Iterator[CaptionedPicture]:
        with reading():
            shard = data_set.shard(num_shards=len(units), index=unit)
            rows: Iterator[Any] = bounded(shard.skip(skip) if skip else shard)
        for number in itertools.count(skip):
            with reading():
                row = next(rows, None)
            if row is None:
                return
            yield picture_of(f"{units[unit]}:{number}", row, None)

    return PictureSource(units, read)

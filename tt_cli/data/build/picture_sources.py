"""Where pictures with captions come from: a folder, a table of captions, WebDataset tars, a data set on the Hub.

A source is a list of units (files, shards), each of which gives its pictures in the same order every time; so a place
in it is a unit and a number, and work goes on from there. Names of columns are taken in any case:

| meaning         | columns                                                                                      |
|-----------------|----------------------------------------------------------------------------------------------|
| caption         | caption, text                                                                                |
| picture         | image, picture, jpg, jpeg, png, webp (bytes), file_name, file, path, filename (beside the table) |
| label           | NSFW                                                                                         |
| sizes           | original_width or width, original_height or height                                           |

Notable:
- a damaged unit gives the pictures before the damage, then raises DamagedUnit; a bad row is a Picture all the same;
- folders are walked in the order of names; each is entered once, so a loop of links ends.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tt_cli.data.columns import ColumnRows
from tt_cli.data.shard_format import LARGEST_MEMBER, tar_samples
from tt_cli.errors import TTError, UsageError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")
TABLES = (".parquet", ".jsonl", ".csv")
CAPTION = ("caption", "text")
EMBEDDED = ("image", "picture", "jpg", "jpeg", "png", "webp")
BESIDE = ("file_name", "file", "path", "filename")
FIELDS = {  # of a row, by the columns that may hold them
    "NSFW": ("nsfw",),
    "original_width": ("original_width", "width"),
    "original_height": ("original_height", "height"),
}


@dataclass(frozen=True)
class CaptionedPicture:
    """One picture of a source, not yet decoded.

    name: for the list of broken ones. caption: bytes where it is not UTF-8. content: the file's bytes or its path.
    fields: what the source says of NSFW, original_width and original_height; what it does not know is not there.
    """

    name: str
    caption: Any
    content: bytes | Path | None
    fields: Mapping[str, Any] = field(default_factory=dict)


class DamagedUnit(TTError):
    """A file of a source cannot be read further; the others can."""


class PictureSource(Protocol):
    """units: their names. total: pictures in all, where that is known without reading them."""

    units: Sequence[str]
    total: int | None

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        """The pictures of a unit from number `skip` on. Raises DamagedUnit, TTError."""
        ...


def open_source(name: str, *, split: str = "train", revision: str | None = None) -> PictureSource:
    """The source of this name: a folder, a .tar, .parquet, .jsonl or .csv file, or OWNER/NAME on the Hub.

    A folder with tars in it is those tars; else one with tables beside the pictures is those tables; else captions
    are in NAME.txt beside each picture. Raises UsageError where there is nothing of the kind.
    """
    from tt_cli.run.run_source import HUB_NAME

    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() == ".tar":
            return TarSource([path])
        if path.suffix.lower() in TABLES:
            return TableSource([path])
        raise UsageError(f"cannot encode {name}: it is no folder and ends in none of .tar, {', '.join(TABLES)}")
    if HUB_NAME.fullmatch(name) and not name.startswith("."):
        from tt_cli.data.build.hub_pictures import HubSource

        return HubSource(name, split, revision)
    raise UsageError(f"cannot encode {name}: there is no such folder or file, and no data set on the Hub is called so")


def _folder(path: Path) -> PictureSource:
    files = walk(path)
    if tars := [file for file in files if file.suffix.lower() == ".tar"]:
        return TarSource(tars)
    for ending in TABLES:
        if tables := [file for file in files if file.parent == path and file.suffix.lower() == ending]:
            return TableSource(tables)
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    if not pictures:
        raise UsageError(f"there is nothing to encode in {path}: no tars, no {', '.join(TABLES)}, no pictures")
    return FolderSource(path, pictures)


def walk(folder: Path) -> list[Path]:
    """All files under a folder, links followed, each folder entered once, in the order of their paths.

    Raises UsageError where the folder itself cannot be read; others that cannot are passed over.
    """
    found: list[Path] = []
    entered: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            status = here.stat()
            entries = list(os.scandir(here))
        except OSError as error:
            if here == folder:
                raise UsageError(f"cannot read the folder {folder}: {error.strerror or error}") from error
            continue
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                folder_too = entry.is_dir()
            except OSError:  # a link to itself
                folder_too = False
            (waiting if folder_too else found).append(Path(entry.path))
    return sorted(found)


class FolderSource:
    """Pictures with their captions in a .txt file of the same name beside them."""

    def __init__(self, folder: Path, pictures: Sequence[Path]):
        self._folder, self._pictures = folder, pictures
        self.units: Sequence[str] = [folder.name]
        self.total: int | None = len(pictures)

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        for path in self._pictures[skip:]:
            yield CaptionedPicture(str(path.relative_to(self._folder)), _caption_beside(path), path)


def _caption_beside(path: Path) -> str | bytes | None:
    try:
        with path.with_suffix(".txt").open("rb") as file:
            return decoded_text(file.read(LARGEST_MEMBER).strip())
    except OSError:
        return None


def decoded_text(text: bytes) -> str | bytes:
    """As UTF-8, or as it is where it is something else."""
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        return text


class TarSource:
    """WebDataset tars: KEY.jpg (or another picture) with KEY.txt, or KEY.json with the columns."""

    def __init__(self, tars: Sequence[Path]):
        self._tars = tars
        self.units: Sequence[str] = [path.name for path in tars]
        self.total: int | None = None

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        path = self._tars[unit]
        with _damaged_unit(path), path.open("rb") as file:
            for number, members in enumerate(tar_samples(file, path.name, _is_of_a_picture, _MOST_IN_TAR)):
                if number >= skip:
                    yield self._picture(path, members)

    @staticmethod
    def _picture(path: Path, members: Mapping[str, bytes]) -> CaptionedPicture:
        name = f"{path.name}/{members[''].decode('utf-8', 'replace')}"
        row: Any = {}
        if "json" in members:
            try:
                row = json.loads(members["json"])
            except (ValueError, RecursionError):
                row = {}
        row = dict(row) if isinstance(row, dict) else {}
        if "txt" in members:
            row = {key: value for key, value in row.items() if key.lower() not in CAPTION}
            row["caption"] = decoded_text(members["txt"].strip())
        content = next((members[kind] for kind in members if f".{kind}" in PICTURES), None)
        return picture_of(name, {**row, "image": content}, None)


_MOST_IN_TAR = 1 << 28


def _is_of_a_picture(kind: str) -> bool:
    return kind in ("json", "txt") or f".{kind}" in PICTURES


class TableSource:
    """Rows of CSV, JSON lines or parquet: pictures in a column of bytes, or as paths beside the table."""

    def __init__(self, tables: Sequence[Path]):
        self._tables = tables
        self.units: Sequence[str] = [path.name for path in tables]
        self.total: int | None = None

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        path = self._tables[unit]
        with _damaged_unit(path):
            for number, row in enumerate(_rows(path, skip), skip):
                yield picture_of(f"{path.name}:{number}", row, path.parent)


def _rows(path: Path, skip: int) -> Iterator[Mapping[str, Any]]:
    if path.suffix.lower() == ".parquet":
        yield from _parquet_rows(path, skip)
        return
    with path.open("rb") as file:
        lines = (line.decode("utf-8", "surrogateescape") for line in file)
        if path.suffix.lower() == ".csv":
            csv.field_size_limit(LARGEST_MEMBER)
            rows: Iterator[Any] = csv.DictReader(_without_mark(lines))
        else:
            rows = (_json_row(line) for line in lines)
        for number, row in enumerate(rows):
            if number >= skip:
                yield {str(key): _unescaped(value) for key, value in row.items()}


def _without_mark(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line.removeprefix("\ufeff")


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _unescaped(value: Any) -> Any:
    """Text that was not UTF-8 as the bytes that it was."""
    if isinstance(value, str) and any("\udc80" <= character <= "\udcff" for character in value):
        return value.encode("utf-8", "surrogateescape")
    return value


def _parquet_rows(path: Path, skip: int) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        wanted = {*CAPTION, *EMBEDDED, *BESIDE, *(name for names in FIELDS.values() for name in names)}
        columns = [name for name in table.schema_arrow.names if name.lower() in wanted]
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                continue
            for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=columns):
                part = batch.slice(min(skip, batch.num_rows))
                skip -= min(skip, batch.num_rows)
                yield from ColumnRows(part)


def picture_of(name: str, row: Mapping[str, Any], folder: Path | None) -> CaptionedPicture:
    """A row of a table as a Picture; paths are taken from `folder`, where there is one.

    A column of pictures holds bytes or, as `datasets` has it, {"bytes", "path"}.
    """
    lower = {key.lower(): value for key, value in row.items()}
    caption = next((lower[column] for column in CAPTION if column in lower), None)
    fields = {}
    for key, columns in FIELDS.items():
        column = next((column for column in columns if column in lower), None)
        if column is not None:
            fields[key] = lower[column] if key == "NSFW" else _whole(lower[column])
    return CaptionedPicture(name, caption, _content(lower, folder), fields)


def _content(row: Mapping[str, Any], folder: Path | None) -> bytes | Path | None:
    for column in EMBEDDED:
        value = row.get(column)
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) and value and folder is not None:
            return folder / value
    for column in BESIDE:
        value = row.get(column)
        if isinstance(value, str) and value and folder is not None:
            return folder / value
    return None


def _whole(value: Any) -> int:
    """A size in pixels, 0 for what is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


@contextmanager
def _damaged_unit(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except DamagedUnit:
        raise
    except (TTError, pyarrow.ArrowException, csv.Error, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DamagedUnit(f"{path} cannot be read to its end: {reason}") from error

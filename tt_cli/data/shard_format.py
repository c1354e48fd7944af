"""Rows of a data set in files of 5-16 MB: parquet, WebDataset tars, JSON lines under Brotli.

A row is a dict of the published columns: caption, NSFW, original_width, original_height, and `code` or `code13`
(bytes, see `codes`); or a text's token ids alone, `ids16` or `ids32`. What a shard does not have is not in its rows.

| name         | content                                                                                           |
|--------------|---------------------------------------------------------------------------------------------------|
| `*.parquet`  | one column each, Brotli by parquet itself, a checksum for each page                               |
| `*.tar`      | WebDataset: a row is KEY.json (all but the codes) and KEY.code or KEY.code13 (the bytes)           |
| `*.jsonl.br` | one JSON object a line, the codes in base64, Brotli over the whole                                |

Notable:
- tars and JSON lines are read as they arrive, from anything that has `read`; parquet needs `seek` as well;
- a row that cannot be understood is yielded with what was understood of it (at worst, nothing), for the filters to
  count: it has its number, and costs no other row. Text that is not UTF-8 stays bytes;
- the rows before a damage are yielded before it is raised. A tar or a Brotli stream that just ends is a damage.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import brotli

from tt_cli.atomic_write import atomic_file
from tt_cli.data.codes import CODE_COLUMNS, ID_COLUMNS
from tt_cli.data.columns import SIZES, Row, column_batches, json_object, text_or_bytes, unescaped
from tt_cli.errors import TTError, disk_remedy, first_line, os_errors

CONTAINERS = (".parquet", ".tar", ".jsonl.br")
TEXTS = ("caption", "NSFW")
BYTES = (*CODE_COLUMNS, *ID_COLUMNS)
COLUMNS = (*TEXTS, *SIZES, *BYTES)
TARGET_BYTES = 10_000_000  # of a shard, before Brotli takes a tenth or a fifth off
BATCH_ROWS = 512
GROUP_ROWS = 2048  # rows of a parquet row group: what damage of one costs, and what is read at once
LARGEST_MEMBER = 1 << 20  # bytes of one file in a tar that are read, and of one line
BROTLI_QUALITY = 8  # of 11; 9 takes eight times as long for no fewer bytes of codes
_TAR_BLOCK = 512
_HELD = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_TAR_KINDS = ("json", "txt", *BYTES)
_PIECE = 1 << 16  # bytes that are read, and decompressed, at once


class DamagedShard(TTError):
    """A shard that cannot be read, or not further."""


@dataclass(frozen=True)
class ShardFacts:
    """A written shard: its file name, how many rows and bytes it has, and the SHA-256 (hex) of the file."""

    name: str
    rows: int
    bytes: int
    sha256: str


def container_of(name: str) -> str | None:
    """The entry of CONTAINERS that this file name ends in."""
    return next((container for container in CONTAINERS if name.endswith(container)), None)


def read_batches(file: BinaryIO, name: str, skip: int = 0) -> Iterator[Sequence[Row]]:
    """The rows of one shard from number `skip` on, in order, up to BATCH_ROWS at a time.

    name: of the shard; its ending says what it is. Raises DamagedShard, after the rows before, where the shard is
    damaged or has columns of other types.
    """
    container = container_of(name)
    if container is None:
        raise TTError(f"cannot read {name}: a shard's name ends in {', '.join(CONTAINERS)}")
    return _FORMATS[container].read(file, name, skip)


def write_shard(path: Path, rows: Sequence[Mapping[str, Any]]) -> ShardFacts:
    """Write rows as the shard `path`, which may replace one; its ending says how. All of it, or nothing.

    All rows have the columns of the first; nobody else writes this shard meanwhile. When this returns, the file is on
    the disk under its name. Raises TTError.
    """
    container = container_of(path.name)
    if container is None or not rows:
        raise ValueError(f"{path.name} with {len(rows)} rows is no shard")
    with writing(path), atomic_file(path) as file:
        _FORMATS[container].write(Path(file.name), rows)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return ShardFacts(path.name, len(rows), size, digest)


def stored_bytes(row: Mapping[str, Any], container: str) -> int:
    """About what a row takes in a shard, before compression."""
    code = sum(len(row[column]) for column in BYTES if column in row)
    rest = len(row.get("caption", "").encode("utf-8", "surrogatepass")) + 24
    if container == ".tar":
        return sum(_TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK for size in (code, rest + 64))
    return code + rest


def writing(target: Path | str) -> AbstractContextManager[None]:
    """Turns an OSError in writing `target` into a TTError with advice."""
    space = "free some space and start again, it goes on from here"
    return os_errors(
        f"cannot write {target}", lambda error: disk_remedy(error, "name a folder that you can write to", space)
    )


# ---------------------------------------------------------------- parquet


def _read_parquet(file: BinaryIO, name: str, skip: int) -> Iterator[Sequence[Row]]:
    import pyarrow.parquet

    with _damage(name):
        shard = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        columns = _parquet_columns(shard.schema_arrow, name)
        yield from column_batches(shard, columns, BATCH_ROWS, skip)


def _parquet_columns(schema: Any, name: str) -> list[str]:
    """Those of ours that the shard has. Raises DamagedShard for one of another type."""
    from pyarrow import types

    fits: dict[str, tuple[str, tuple[Callable[[Any], bool], ...]]] = {
        **dict.fromkeys(TEXTS, ("text", (types.is_string, types.is_large_string, types.is_null, types.is_dictionary))),
        **dict.fromkeys(SIZES, ("whole numbers", (types.is_integer, types.is_floating, types.is_null))),
        **dict.fromkeys(BYTES, ("bytes", (types.is_binary, types.is_large_binary, types.is_fixed_size_binary))),
    }
    columns = [column for column in COLUMNS if column in schema.names]
    for column in columns:
        kind = schema.field(column).type
        wanted, tests = fits[column]
        if not any(test(kind) for test in tests):
            raise DamagedShard(f"the shard {name} is of no use: its column {column} is {kind}, not {wanted}")
    return columns


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    types = {
        **dict.fromkeys(TEXTS, pyarrow.string()),
        **dict.fromkeys(SIZES, pyarrow.int64()),
        **dict.fromkeys(BYTES, pyarrow.binary()),
    }
    schema = pyarrow.schema([(column, types[column]) for column in COLUMNS if column in rows[0]])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(list(rows), schema=schema),
        path,
        compression="brotli",
        compression_level=BROTLI_QUALITY,
        row_group_size=GROUP_ROWS,
        use_dictionary=["NSFW"],
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )


# ---------------------------------------------------------------- JSON lines under Brotli


def _read_lines(file: BinaryIO, name: str, skip: int) -> Iterator[Sequence[Row]]:
    return _in_batches(map(_parsed, itertools.islice(_lines(file, name), skip, None)))


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    decompressor, rest = brotli.Decompressor(), b""
    while not decompressor.is_finished():
        with _damage(name):
            content = file.read(_PIECE) if decompressor.can_accept_more_data() else b""
            output = decompressor.process(content, output_buffer_limit=_PIECE)  # a few bytes can stand for gigabytes
            if not (content or output or decompressor.is_finished()):
                raise EOFError("its Brotli stream just ends")
            *lines, rest = (rest + output).split(b"\n")
        yield from lines
        if len(rest) > LARGEST_MEMBER:
            raise DamagedShard(f"the shard {name} is of no use: it has a line of over {LARGEST_MEMBER} bytes")
    if rest:
        yield rest


def _parsed(line: bytes) -> Row:
    """The row in a line, as far as it is understood: an empty one of what is no JSON object."""
    return row_of_json(json_object(line.decode("utf-8", "surrogateescape")))


def row_of_json(known: Mapping[str, Any]) -> Row:
    """A row of what `row_to_json` made, as far as it is one."""
    row: Row = {column: known[column] for column in COLUMNS if column in known}
    for column in TEXTS:
        if isinstance(text := row.get(column), str):
            row[column] = unescaped(text)
    for column in BYTES:
        if isinstance(row.get(column), str):
            with suppress(ValueError):  # stays text, which is no code
                row[column] = base64.b64decode(row[column], validate=True)
    return row


def row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as what JSON can hold: the codes in base64."""
    codes = {column: base64.b64encode(row[column]).decode("ascii") for column in BYTES if column in row}
    return {column: codes.get(column, row[column]) for column in COLUMNS if column in row}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row_to_json(row), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    compressor = brotli.Compressor(quality=BROTLI_QUALITY)
    with path.open("wb") as file:
        for row in rows:
            file.write(compressor.process(_line(row) + b"\n"))
        file.write(compressor.finish())


# ---------------------------------------------------------------- WebDataset tars


def _read_tar(file: BinaryIO, name: str, skip: int) -> Iterator[Sequence[Row]]:
    samples = tar_samples(file, name, lambda kind: kind in _TAR_KINDS)
    return _in_batches(map(_tar_row, itertools.islice(samples, skip, None)))


def tar_samples(
    file: BinaryIO, name: str, wanted: Callable[[str], bool], most: int = LARGEST_MEMBER
) -> Iterator[dict[str, bytes]]:
    """The samples of a WebDataset tar: for each, its members by what follows the first dot, and "" for the key.

    Members that are not `wanted`, and those of over `most` bytes, are there without content. Raises DamagedShard.
    """
    with _damage(name):
        archive: Any = tarfile.open(fileobj=file, mode="r|", tarinfo=_StrictHeader)  # noqa: SIM115 - not ours to close
    sample: dict[str, bytes] = {}
    while True:
        with _damage(name):
            member = archive.next()
            if member is None:
                break
            if not member.isreg():
                continue
            folder, slash, file_name = member.name.rpartition("/")
            stem, _, kind = file_name.partition(".")
            key = (folder + slash + stem).encode("utf-8", "surrogateescape")
            if sample and sample[""] != key:
                yield sample
                sample = {}
            opened = archive.extractfile(member) if wanted(kind.lower()) and member.size <= most else None
            sample |= {kind.lower(): opened.read() if opened else b"", "": key}
        archive.members = []  # it would remember every one
    if sample:
        yield sample


class _StrictHeader(tarfile.TarInfo):
    """Takes an archive without its end for a damaged one, where tarfile just stops, and one whose names have no end."""

    @classmethod
    def frombuf(cls, *arguments: Any) -> Any:
        header = super().frombuf(*arguments)
        if header.type in _HELD and header.size > LARGEST_MEMBER:
            raise tarfile.ReadError(f"a name or its like of {header.size:,} bytes")
        return header

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # the block of zeros that ends an archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where the next file or the end of the archive should be") from error


def _tar_row(members: Mapping[str, bytes]) -> Row:
    row = _parsed(members["json"]) if members.get("json") else {}
    if "caption" not in row and "txt" in members:
        row["caption"] = text_or_bytes(members["txt"].strip())
    codes = {column: members[column] for column in BYTES if column in members}
    return {column: row[column] for column in row if column not in BYTES} | codes


def _write_tar(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number, row in enumerate(rows):
            members = {"json": _line({column: row[column] for column in row if column not in BYTES})}
            members |= {column: row[column] for column in BYTES if column in row}
            for kind, content in members.items():
                member = tarfile.TarInfo(f"{number:06d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _in_batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Lists of BATCH_ROWS rows, and of the last ones before the end or an error."""
    batch: list[Row] = []
    try:
        for row in rows:
            batch.append(row)
            if len(batch) == BATCH_ROWS:
                yield batch
                batch = []
    except DamagedShard:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


class _Format(NamedTuple):
    read: Callable[[BinaryIO, str, int], Iterator[Sequence[Row]]]
    write: Callable[[Path, Sequence[Mapping[str, Any]]], None]


_FORMATS = {
    ".parquet": _Format(_read_parquet, _write_parquet),
    ".tar": _Format(_read_tar, _write_tar),
    ".jsonl.br": _Format(_read_lines, _write_lines),
}


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise what the libraries raise over a damaged file as one line."""
    import pyarrow

    damage = (pyarrow.ArrowException, brotli.error, tarfile.TarError, OSError, EOFError, ValueError)  # tarfile's maps
    try:
        yield
    except (*damage, MemoryError, RecursionError) as error:  # what would take all memory, and headers of headers
        message = f"the shard {name} cannot be read to its end ({first_line(error)}); fetch or make it again"
        raise DamagedShard(message) from error

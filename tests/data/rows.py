"""Runs and rows for these tests: a grid of 2 x 2 codes below 10, in parquet files of a folder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from tt_cli.data.shard_format import read_batches
from tt_cli.run import RunConfig, load_run


def code(*codes: int) -> bytes:
    return np.array(codes, dtype="<i2").tobytes()


def row(**changes: Any) -> dict[str, Any]:
    """A row that passes, with changes; a column that is set to `...` is left out."""
    fields = {
        "caption": "red apple",
        "NSFW": "UNLIKELY",
        "original_width": 640,
        "original_height": 480,
        "code": code(1, 2, 3, 4),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows whose captions and codes tell them apart."""
    return [row(caption=f"row {i}", code=code(i % 10, i // 10 % 10, i // 100 % 10, 7)) for i in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="brotli")


def bomb(path: Path) -> None:
    """A parquet file of kilobytes with a caption of 8 MiB, once in the file and 5,000 times in its rows: 40 GB."""
    captions = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000), pyarrow.array(["a" * (8 << 20)]))
    table = pyarrow.table({"caption": captions, "code": [code(1, 2, 3, 4)] * 5000})
    limits = {"dictionary_pagesize_limit": 1 << 30, "write_statistics": False, "store_schema": False}
    pyarrow.parquet.write_table(table, path, compression="brotli", **limits)
    assert path.stat().st_size < 20_000


def png(number: int = 0) -> bytes:
    """A picture of its own size and colour."""
    file = io.BytesIO()
    Image.new("RGB", (4 + number % 5, 4), (number % 256, 0, 0)).save(file, "PNG")
    return file.getvalue()


def tar(members: list[tuple[str, bytes]]) -> bytes:
    """Of these files; a name that ends in a slash is a folder's."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def read_rows(file: BinaryIO, name: str, skip: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a shard one by one."""
    return chain.from_iterable(read_batches(file, name, skip))


def rows_in(out: Path) -> list[dict[str, Any]]:
    """Of all shards of a folder that was encoded."""
    found = []
    for path in sorted((out / "data").iterdir()):
        with path.open("rb") as file:
            found += list(read_rows(file, path.name))
    return found


def run_on(folder: Path | str, **data: Any) -> RunConfig:
    """The emoji run, reading a data set as if from the Hub: `datasets` takes a folder for a repository."""
    changes = {f"data.{key}": value for key, value in data.items()}
    return load_run("emoji").replaced(
        {
            "data.source": "hub",
            "data.name": str(folder),
            "vqgan.source": "hub",
            "vqgan.filename": "model.safetensors",
            "vqgan.grid": 2,
            "vqgan.pixels": 16,
            "vqgan.codebook_size": 10,
            **changes,
        }
    )

"""Documents of a run's data: built in, in files on this machine, or streamed from the Hub through `datasets`."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tt_cli.data import builtin
from tt_cli.data.folder_walk import files_below
from tt_cli.data.memory_bound import bounded
from tt_cli.data.stream.shard_locations import NoSplit, of_split
from tt_cli.data.stream.subset import SHARDS_AT_ONCE
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.dataset_errors import dataset_errors
from tt_cli.hub.hub_files import NO_DATA_SET
from tt_cli.run.text_parts import TextDataPart

# Suffix of a file: what `datasets` calls it, and how it reads it.
UTF8 = {"encoding": "utf-8-sig", "encoding_errors": "replace"}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".jsonl": ("json", UTF8),
    ".txt": ("text", {"sample_by": "document", **UTF8}),
}


def documents(data: TextDataPart, split: str, seed: int | None = None) -> Iterator[Any]:
    """One pass over what is in the column of a split; a text, or its bytes, where all is well.

    seed: shuffles what is streamed, and None nothing. Raises UsageError where there is no such data set or column,
    NoSplit where it has no such split, TTError where it cannot be read.
    """
    if data.source == "builtin":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(builtin.checked_file(data.name, f"{split}.parquet"))
        _check_column(data, table.column_names)
        yield from table.column(data.column).to_pylist()
        return
    with dataset_errors(f"cannot read the data set {data.name}", NO_DATA_SET):
        rows = _opened(data, split)
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=data.shuffle_buffer, max_buffer_input_shards=SHARDS_AT_ONCE)
        for row in bounded(rows):
            _check_column(data, row)
            yield row[data.column]


def _check_column(data: TextDataPart, columns: Collection[str]) -> None:
    if data.column not in columns:
        raise UsageError(f"the data set {data.name} has no column {data.column}; it has {', '.join(sorted(columns))}")


def _opened(data: TextDataPart, split: str) -> Any:
    import datasets

    if data.source == "hub":
        splits = datasets.load_dataset(data.name, data.configuration, revision=data.revision, streaming=True)
        if split not in splits:
            raise NoSplit(f"the data set {data.name} has no split '{split}'; it has {' and '.join(splits)}")
        return splits[split]
    place = Path(os.path.expanduser(data.location or ""))
    if not place.exists():
        raise UsageError(f"cannot read the data set {place}: there is no such file or folder; check data.location")
    found = [place] if place.is_file() else files_below(place, _fail)
    suffixes = sorted({file.suffix for file in found} & FORMATS.keys())
    if len(suffixes) != 1:
        what = f"{' and '.join(suffixes)} files" if suffixes else f"no file that ends in {', '.join(FORMATS)}"
        raise UsageError(f"cannot read the data set {place}: it has {what}; put files of one kind there")
    base = place.parent if place.is_file() else place
    files = {str(file.relative_to(base)): str(file) for file in found if file.suffix in suffixes}
    kind, options = FORMATS[suffixes[0]]
    paths = [files[name] for name in of_split(files, split, str(place))]
    opened = functools.partial(datasets.load_dataset, kind, data_files=paths, split="train", streaming=True)
    rows = opened(**options)
    if kind == "parquet" and getattr(rows.features.get(data.column), "dtype", "") in ("string", "large_string"):
        as_bytes = datasets.Features({data.column: datasets.Value("binary")})  # for they may be no UTF-8
        rows = opened(columns=[data.column], features=as_bytes)
    return rows


def _fail(error: OSError) -> None:
    raise TTError(f"cannot read {error.filename}: {error.strerror or error}") from error

"""The rows of a part of a parquet shard, held as columns.

Most rows are as they should be, and to see that one look at each column is enough; a dict for each row costs more time
than all the rest of reading. Only rows with something odd about them are looked at one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tt_cli.data.codes import CODE_COLUMNS, column_bytes, from_bytes
from tt_cli.data.memory_bound import bounded
from tt_cli.data.row_rules import RowRules

Row = dict[str, Any]
CAPTION, LABEL, SIZES = "caption", "NSFW", ("original_width", "original_height")


class ColumnRows(Sequence[Row]):
    """A sequence of rows over a pyarrow RecordBatch; a row is made when it is asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch, self._names = batch, batch.schema.names

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def __getitem__(self, place: Any) -> Any:
        """The row at this place from the first; slices are not taken."""
        return list(ColumnRows(self._batch.slice(place, 1)))[0]

    def __iter__(self) -> Iterator[Row]:
        if not self._names:
            yield from ({} for _ in range(len(self)))
        for values in zip(*(column_values(column) for column in self._batch.columns), strict=True):
            yield dict(zip(self._names, values, strict=True))

    def chosen(self, places: np.ndarray) -> ColumnRows:
        """The rows at these places (k,), together."""
        import pyarrow

        return ColumnRows(self._batch.take(pyarrow.array(places)))

    def plain(self, rules: RowRules) -> tuple[list[Any], np.ndarray, np.ndarray] | None:
        """All captions, all codes (n, k) int16, and which rows (n,) certainly pass the rules but for the codes' range.

        None where a column is unlike what it should be: then the rows must be looked at one by one.
        """
        codes = self._codes(rules)
        captions = self._captions()
        if codes is None or captions is None:
            return None
        least = rules.min_caption_length if rules.filtered else 1
        passed = np.array([bool(text) and len(text) >= least and not text.isspace() for text in captions], dtype=bool)
        if rules.filtered:
            for fits in (self._labelled(rules), self._shaped(rules)):
                if fits is None:
                    return None
                passed &= fits
        return captions, codes, passed

    def _column(self, name: str) -> Any:
        return self._batch.column(self._names.index(name))

    def _captions(self) -> list[Any] | None:
        import pyarrow

        if CAPTION in self._names and pyarrow.types.is_string(self._column(CAPTION).type):
            with suppress(UnicodeDecodeError):
                return list(self._column(CAPTION).to_pylist())
        return None

    def _codes(self, rules: RowRules) -> np.ndarray | None:
        """Codes (n, k) int16; None unless each row has as many bytes as its codes should."""
        import pyarrow

        names = [name for name in CODE_COLUMNS if name in self._names]
        if len(names) != 1 or not pyarrow.types.is_binary(self._column(names[0]).type):
            return None
        column, width = self._column(names[0]), column_bytes(names[0], rules.codes, rules.codebook_size)
        _, ends, values = column.buffers()
        offsets = np.frombuffer(ends, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if not len(column) or not (np.diff(offsets) == width).all():
            return None
        content = np.frombuffer(values, dtype=np.uint8)[offsets[0] : offsets[-1]]
        return from_bytes(names[0], content.reshape(len(column), width), rules.codes, rules.codebook_size)

    def _labelled(self, rules: RowRules) -> np.ndarray | None:
        import pyarrow
        import pyarrow.compute

        if LABEL not in self._names:
            return np.ones(len(self), dtype=bool)
        column = self._column(LABEL)
        if not pyarrow.types.is_string(column.type):
            return None
        allowed = pyarrow.compute.is_in(column, value_set=pyarrow.array(rules.nsfw_allowed, pyarrow.string()))
        return np.asarray(allowed.to_numpy(zero_copy_only=False), dtype=bool)

    def _shaped(self, rules: RowRules) -> np.ndarray | None:
        import pyarrow

        if not all(name in self._names for name in SIZES):
            return np.ones(len(self), dtype=bool)
        columns = [self._column(name) for name in SIZES]
        if any(column.null_count or not pyarrow.types.is_integer(column.type) for column in columns):
            return None
        width, height = (column.to_numpy(zero_copy_only=False).astype(np.float64) for column in columns)
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        return np.asarray((shorter > 0) & (longer <= rules.max_aspect_ratio * shorter))


def column_values(column: Any) -> list[Any]:
    """A column's values; of a text column, those that are not UTF-8 as bytes."""
    import pyarrow

    with suppress(UnicodeDecodeError):
        return list(column.to_pylist())
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    large = pyarrow.types.is_large_string(column.type)
    values = column.view(pyarrow.large_binary() if large else pyarrow.binary()).to_pylist()
    return [value if value is None else text_or_bytes(value) for value in values]


def column_batches(table: Any, columns: Sequence[str], size: int, skip: int) -> Iterator[ColumnRows]:
    """The rows of a pyarrow ParquetFile from number `skip` on, up to `size` at a time. columns: that are read."""
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for batch in bounded(table.iter_batches(batch_size=size, row_groups=[group], columns=columns)):
            if skip < batch.num_rows:
                yield ColumnRows(batch.slice(skip))
            skip -= min(skip, batch.num_rows)


def text_or_bytes(value: bytes, encoding: str = "utf-8") -> str | bytes:
    """As text; as it is where it is not UTF-8."""
    try:
        return value.decode(encoding)
    except UnicodeDecodeError:
        return value


def unescaped(text: str) -> str | bytes:
    """Text that was decoded with "surrogateescape" as the bytes that it was, where those are not UTF-8."""
    try:
        return text_or_bytes(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return text


def json_object(text: str) -> Row:
    """A JSON object; an empty one for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

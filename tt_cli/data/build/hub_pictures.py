"""A data set of pictures on the Hub, streamed by `datasets`: nothing of it is kept on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tt_cli.data.build.picture_sources import CAPTION, EMBEDDED, DamagedUnit, CaptionedPicture, picture_of
from tt_cli.errors import UsageError
from tt_cli.hub.dataset_errors import dataset_errors

MISSING = "the Hub has no such data set, or it is private; check the name"


class HubSource:
    """Its units are the shards that `datasets` divides it into. Raises UsageError without pictures or captions."""

    def __init__(self, name: str, split: str, revision: str | None):
        import datasets

        self._name = name
        with self._reading():
            self._set = datasets.load_dataset(name, revision=revision, split=split, streaming=True)
            columns = self._set.column_names or list(next(iter(self._set), {}))
        pictures = [column for column in columns if column.lower() in EMBEDDED]
        captions = [column for column in columns if column.lower() in CAPTION]
        if not (pictures and captions):
            raise UsageError(
                f"cannot encode {name}: it needs a column of pictures ({', '.join(EMBEDDED)}) and one of captions "
                f"({', '.join(CAPTION)}); it has {', '.join(columns) or 'no row'}"
            )
        features = self._set.features or {}
        for column in pictures:
            if isinstance(features.get(column), datasets.Image):
                self._set = self._set.cast_column(column, datasets.Image(decode=False))
        self.units: Sequence[str] = [f"{name} shard {number}" for number in range(self._set.num_shards)]
        self.total: int | None = None

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        """See PictureSource."""
        with self._reading():
            shard = self._set.shard(num_shards=len(self.units), index=unit)
            rows: Iterator[Any] = iter(shard.skip(skip) if skip else shard)
        for number in range(skip, 1 << 62):
            with self._reading():
                row = next(rows, None)
            if row is None:
                return
            yield picture_of(f"{self.units[unit]}:{number}", row, None)

    def _reading(self) -> AbstractContextManager[None]:
        return dataset_errors(f"cannot read the data set {self._name}", MISSING, DamagedUnit)

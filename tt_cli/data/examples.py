"""One example, a batch of them, and which rows of a data set become examples.

A row is what `datasets` yields: caption, NSFW, original_width, original_height, and code, the codes as
little-endian int16 in raster order. The filters are those of the paper's run; a row that cannot be right (codes of
another width, codes out of range, no caption) never reaches training, whatever the run file says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from tt_cli.errors import TTError
from tt_cli.run import RunConfig

COLUMNS = ("caption", "code")  # a data set without them is not for us; the others may be missing
CODE_DTYPE = np.dtype("<i2")
# Bad rows one after the other, after which the data set is said to be unusable.
HOPELESS = 20_000


@dataclass(frozen=True)
class Example:
    """A caption and the codes (n,) int16 of its picture, row by row."""

    caption: str
    codes: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Text (b, text_length) int64, right-padded; image (b, n) int64; and the captions as they were."""

    text: torch.Tensor
    image: torch.Tensor
    captions: list[str]


@dataclass
class Counts:
    """Rows seen so far, by what became of them. Only `kept` reached training."""

    kept: int = 0
    short_caption: int = 0
    aspect_ratio: int = 0
    nsfw: int = 0
    no_caption: int = 0
    code_width: int = 0
    code_range: int = 0

    @property
    def dropped(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.kept

    def in_words(self) -> str:
        """Such as "12 rows: kept 10, nsfw 2"."""
        parts = [f"{field.name} {getattr(self, field.name)}" for field in fields(self) if getattr(self, field.name)]
        return f"{self.kept + self.dropped} rows: {', '.join(parts) or 'none'}".replace("_", " ")


class RowFilter:
    """Tells rows that may be trained on from those that may not, and counts both."""

    def __init__(self, run: RunConfig) -> None:
        self.data = run.data
        self.filtered = run.data.source == "hub"  # the built-in data were filtered when they were built
        self.code_bytes = run.vqgan.grid**2 * CODE_DTYPE.itemsize
        self.codebook_size = run.vqgan.codebook_size
        self.nsfw_allowed = frozenset(run.data.nsfw_allowed)
        self.counts = Counts()
        self._out_of_range = 0  # rows since the last that `collate` kept

    def reason(self, row: Mapping[str, Any]) -> str | None:
        """The field of `Counts` that tells why this row is left out, or None if nothing is wrong so far.

        Codes out of range are found by `collate`, for a whole batch at once. Width and height of 0, and a label of
        None, are unlike their absence: the data set has the column, and this row fails it.
        """
        caption, code = row.get("caption"), row.get("code")
        if not isinstance(caption, str) or not caption.strip():
            return "no_caption"
        if not isinstance(code, bytes) or len(code) != self.code_bytes:
            return "code_width"
        if not self.filtered:
            return None
        if len(caption) < self.data.min_caption_length:
            return "short_caption"
        if "NSFW" in row and row["NSFW"] not in self.nsfw_allowed:
            return "nsfw"
        if "original_width" in row and "original_height" in row:
            sides = (row["original_width"] or 0, row["original_height"] or 0)
            if min(sides) <= 0 or max(sides) > self.data.max_aspect_ratio * min(sides):
                return "aspect_ratio"
        return None

    def __call__(self, rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The rows with nothing wrong; the others are counted. Raises TTError after HOPELESS of them on end."""
        in_vain = 0
        for row in rows:
            reason = self.reason(row)
            if reason is None:
                in_vain = 0
                yield row
                continue
            setattr(self.counts, reason, getattr(self.counts, reason) + 1)
            in_vain += 1
            if in_vain == HOPELESS:
                raise self.unusable()

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], np.ndarray]:
        """Captions and codes (b, n) int16 of the rows whose codes are all in the codebook; the rest is counted.

        Raises TTError after HOPELESS rows on end that are out of range.
        """
        codes = np.frombuffer(b"".join(row["code"] for row in rows), dtype=CODE_DTYPE).reshape(len(rows), -1)
        good = np.flatnonzero(((codes >= 0) & (codes < self.codebook_size)).all(axis=1))
        captions = [rows[i]["caption"] for i in good]
        self.counts.kept += len(captions)
        self.counts.code_range += len(rows) - len(captions)
        self._out_of_range = 0 if captions else self._out_of_range + len(rows)
        if self._out_of_range >= HOPELESS:
            raise self.unusable()
        return captions, codes if len(captions) == len(rows) else codes[good]

    def unusable(self) -> TTError:
        """What to raise when the data set has nothing for this run."""
        return TTError(
            f"the data set {self.data.name} has no example that this run can use ({self.counts.in_words()}); "
            "check [data] and [vqgan] in the run file"
        )

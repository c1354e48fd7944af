"""One example, a batch of them, and which rows of a data set become examples.

A row is what `datasets` yields: caption, NSFW, original_width, original_height, and code, the codes as
little-endian int16 in raster order. The filters are those of the paper's run; a row that cannot be right (codes of
another width, codes out of range, no caption) never reaches training, whatever the run file says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tt_cli.data.codes import CODE, CODE_COLUMNS, PACKED, column_bytes, from_column
from tt_cli.data.columns import ColumnRows
from tt_cli.data.row_rules import RowRules
from tt_cli.errors import TTError

if TYPE_CHECKING:  # the process that reads ahead does without
    import torch

COLUMNS = ("caption", CODE)  # a data set without them is not for us; the others may be missing
HOPELESS = 20_000  # bad rows before the first good one, after which the data set is said to be unusable


@dataclass(frozen=True)
class Example:
    """A caption and the codes (n,) int16 of its picture, row by row."""

    caption: str
    codes: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Samples side by side: named tensors whose first dimension is samples. captions: each in words, for people.

    A DALL-E's: text (b, text_length) int64, right-padded; image (b, n) int64.
    """

    tensors: dict[str, torch.Tensor]
    captions: Sequence[str] = ()

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, some: slice) -> Batch:
        return Batch({name: tensor[some] for name, tensor in self.tensors.items()}, self.captions[some])

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.captions)


class RowCounts(Counter[str]):
    """Rows seen so far, by what became of them: those "kept" reached training, the others have the reason against them.

    no_caption, short_caption, aspect_ratio, nsfw: the filters. code_width, code_range: no codes of this run. not_utf8:
    a caption that is no text. wrong_type: a label or a size that is of another type. damaged: rows of shards that could
    not be read, where it is known how many. no_text: a document that is empty, or none.
    """

    def problems(self) -> Counter[str]:
        """Rows that were left out, by why."""
        return Counter({reason: count for reason, count in sorted(self.items()) if reason != "kept" and count})

    def in_words(self) -> str:
        """Such as "12 rows: kept 10, nsfw 2"."""
        parts = {"kept": self["kept"]} if self["kept"] else {}
        words = ", ".join(f"{name} {count}" for name, count in (parts | self.problems()).items())
        return f"{self.total()} rows: {words or 'none'}".replace("_", " ")


Sifted = tuple[list[str], np.ndarray, np.ndarray]


class RowFilter:
    """Tells rows that may be trained on from those that may not, and counts both. hopeless: in place of HOPELESS."""

    def __init__(self, rules: RowRules, hopeless: float | None = None) -> None:
        self.rules = rules
        self.counts = RowCounts()
        self._width = {name: column_bytes(name, rules.codes, rules.codebook_size) for name in CODE_COLUMNS}
        self._hopeless = HOPELESS if hopeless is None else hopeless

    def reason(self, row: Mapping[str, Any]) -> str | None:
        """The key of `RowCounts` that tells why this row is left out, or None if nothing is wrong so far.

        Codes out of range are found by `sift`, for many rows at once. Width and height of 0, and a label of None,
        are unlike their absence: the data set has the column, and this row fails it.
        """
        if (reason := self.rules.against_caption(row.get("caption"))) is not None:
            return reason
        if self._column(row) is None:
            return "code_width"
        if self.rules.filtered and "NSFW" in row:
            label = row["NSFW"]
            if label is not None and not isinstance(label, str):
                return "wrong_type"
            if label not in self.rules.nsfw_allowed:
                return "nsfw"
        if self.rules.filtered and "original_width" in row and "original_height" in row:
            return self.rules.against_shape(row["original_width"], row["original_height"])
        return None

    def sift(self, rows: Sequence[Mapping[str, Any]]) -> Sifted:
        """Captions and codes (k, n) int16 of the good rows, and their places (k,) in `rows`; the rest is counted.

        Raises TTError after HOPELESS bad rows and no good one.
        """
        if isinstance(rows, ColumnRows) and (plain := rows.plain(self.rules)) is not None:
            captions, codes, passed = plain
            odd = np.flatnonzero(~passed)
            passed[odd] = self._passed(rows.chosen(odd)) if len(odd) else False
            return self._kept(captions, codes, passed)
        rows = list(rows)
        passed = self._passed(rows)
        codes = np.zeros((len(rows), self.rules.codes), dtype=np.int16)
        for column in CODE_COLUMNS:
            places = [place for place in np.flatnonzero(passed) if self._column(rows[place]) == column]
            packed = [rows[place][column] for place in places]
            codes[places] = from_column(column, packed, self.rules.codes, self.rules.codebook_size)
        return self._kept([row.get("caption") for row in rows], codes, passed)

    def _passed(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """A mask (b,) of the rows with nothing wrong but perhaps codes out of range; the others are counted."""
        reasons = [self.reason(row) for row in rows]
        self.counts.update(reason for reason in reasons if reason is not None)
        return np.array([reason is None for reason in reasons], dtype=bool)

    def _kept(self, captions: list[Any], codes: np.ndarray, passed: np.ndarray) -> Sifted:
        """The result of `sift`, of rows of which those that `passed` (b,) have codes; those in range are kept."""
        in_range = (codes.view(np.uint16) < self.rules.codebook_size).all(axis=1)  # as if below 0 were very large
        good = np.flatnonzero(passed & in_range)
        self.counts.update(kept=len(good), code_range=int(passed.sum()) - len(good))
        if not self.counts["kept"] and self.counts.total() - self.counts["damaged"] >= self._hopeless:
            raise self.unusable()
        return [captions[place] for place in good], codes[good], good

    def unusable(self) -> TTError:
        """The error to raise when the data set has nothing for this run."""
        return TTError(
            f"the data set {self.rules.name} has no example that this run can use ({self.counts.in_words()}); "
            "check [data] and [vqgan] in the run file"
        )

    def _column(self, row: Mapping[str, Any]) -> str | None:
        """The column that has the codes of this row, at their width."""
        for column, width in self._width.items():
            if isinstance(codes := row.get(column), bytes) and len(codes) == width:
                return column
        return None


def missing_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns that a row of an unknown data set would need; the codes may be in either one."""
    return [name for name in COLUMNS if name not in row and not (name == CODE and PACKED in row)]

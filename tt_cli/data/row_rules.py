"""Rules by which rows of a data set become examples: those of the paper's run, as a run file sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tt_cli.run import DalleRun, RunConfig


@dataclass(frozen=True)
class RowRules:
    """The demands of a run on a row: `codes` of them below `codebook_size`, and the filters of [data] if `filtered`."""

    name: str  # of the data set, for words
    filtered: bool
    codes: int
    codebook_size: int
    min_caption_length: int
    max_aspect_ratio: float
    nsfw_allowed: tuple[str, ...]

    @classmethod
    def of(cls, run: RunConfig) -> RowRules:
        """Those of a run file."""
        run, data = DalleRun.of(run), run.data
        return cls(
            name=data.name,
            filtered=data.source != "builtin",  # the built-in data were filtered when they were built
            codes=run.vqgan.grid**2,
            codebook_size=run.vqgan.codebook_size,
            min_caption_length=data.min_caption_length,
            max_aspect_ratio=data.max_aspect_ratio,
            nsfw_allowed=tuple(data.nsfw_allowed),
        )

    def against_caption(self, caption: Any) -> str | None:
        """The key of `RowCounts` that tells why a caption is no good, None if it is."""
        if not isinstance(caption, str) or not caption.strip():
            return "no_caption" if caption is None or isinstance(caption, str) else "not_utf8"
        if not caption.isascii() and any("\ud800" <= character <= "\udfff" for character in caption):
            return "not_utf8"  # half of a surrogate pair, which JSON can spell
        return "short_caption" if self.filtered and len(caption) < self.min_caption_length else None

    def against_shape(self, width: Any, height: Any) -> str | None:
        """As `against_caption`, of the sides of a picture in pixels."""
        sides = (width or 0, height or 0)
        if not all(isinstance(side, (int, float)) for side in sides):
            return "wrong_type"
        return None if all(0 < side <= self.max_aspect_ratio * min(sides) for side in sides) else "aspect_ratio"

"""Pictures with captions to shards of codes: the way of `tt data encode`.

    source → filters → decoding, in worker processes → VQGAN, in batches → journal → shards

Notable:
- results are taken in the order of the source, so a place in it says all about what is done: see `journal`;
- no picture ends the work: what cannot be used is counted by its reason, and listed if it is broken;
- codes are the mode of the VQGAN's distribution, so the same picture has the same codes on every machine, up to near
  ties.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tt_cli.data.build.decoder_pool import Chosen, DecoderPool
from tt_cli.data.build.journal import Journal, Place
from tt_cli.data.build.picture_decoding import Decoded, Undecodable
from tt_cli.data.build.picture_sources import CaptionedPicture, DamagedUnit, PictureSource
from tt_cli.data.codes import CODE, to_column
from tt_cli.data.columns import LABEL, SIZES, Row
from tt_cli.data.row_rules import RowRules
from tt_cli.errors import TTError, UsageError, is_out_of_memory
from tt_cli.run import DalleRun, RunConfig

MOST_UNRECORDED = 512  # pictures that are left out one after the other, before that is recorded too
REPORT_SECONDS = 1.0
GPU_PICTURE_BYTES = 170e6  # of activations, for 256 x 256 pixels in float32
FIELDS = (LABEL, *SIZES)


@dataclass(frozen=True)
class WorkShare:
    """Worker `index` (from 0) of `count`: a share of the units, or of all their pictures where there are fewer."""

    index: int = 0
    count: int = 1


LEFT_OUT = {  # reasons for which a picture is left out, in words
    "no_caption": "no caption",
    "short_caption": "caption too short",
    "not_utf8": "caption not UTF-8",
    "nsfw": "label not allowed",
    "aspect_ratio": "too long or too high",
    "missing": "no picture",
    "too_large": "picture too large",
    "broken": "picture broken",
    "damaged_file": "files of the source damaged",
    "no_text": "no text",
}


@dataclass(frozen=True)
class EncodingProgress:
    """The progress of one worker."""

    counts: Mapping[str, int]  # "seen", "kept", and pictures left out by `reason_against`
    shards: int
    bytes: int
    seconds: float  # since this start
    per_second: float
    eta: float | None  # seconds that are left at this speed, None where the number of pictures is not known

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{key: self.counts.get(key, 0) for key in ("seen", "kept", *self.counts.keys() & {"tokens"})},
            "left_out": {key: self.counts[key] for key in LEFT_OUT if self.counts.get(key)},
            "shards": self.shards,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "per_second": round(self.per_second, 3),
            "eta_s": None if self.eta is None else round(self.eta, 1),
        }


def reason_against(picture: CaptionedPicture, rules: RowRules, columns: Sequence[str] = ()) -> str | None:
    """The reason for which the run's filters leave a picture out before it is decoded, None if they do not.

    columns: of its row. Training takes none without a label from a data set that has them.
    """
    if (reason := rules.against_caption(picture.caption)) is not None:
        return reason
    if LABEL in (*picture.fields, *columns) and picture.fields.get(LABEL) not in rules.nsfw_allowed:
        return "nsfw"
    width, height = _sizes(picture)
    if width and (reason := rules.against_shape(width, height)) is not None:
        return reason
    return None if picture.content else "missing"


def _sizes(picture: CaptionedPicture) -> tuple[int, int]:
    """The sides of the original, as the source says; zeros where it does not."""
    width, height = (picture.fields.get(key, 0) for key in SIZES)
    return (width, height) if width > 0 and height > 0 else (0, 0)


def fields_of(source: PictureSource) -> tuple[str, ...]:
    """The columns of the rows beside caption and codes: a label only where the first picture that can be read has one.

    Raises UsageError where there is none.
    """
    for unit in range(len(source.units)):
        with suppress(DamagedUnit):
            for picture in source.read(unit, 0):
                return FIELDS if LABEL in picture.fields else FIELDS[1:]
    raise UsageError("the source has no picture at all; give a folder, tars, a table or a data set that has")


@dataclass(frozen=True)
class EncodingJob:
    """The work of one worker, and the way to do it."""

    source: PictureSource
    run: RunConfig  # whose VQGAN and filters these are
    share: WorkShare = WorkShare()
    column: str = CODE  # of the codes
    fields: tuple[str, ...] = FIELDS  # columns beside caption and codes, see `fields_of`
    batch: int = 4  # pictures that are encoded side by side
    workers: int = 1  # processes that decode

    @cached_property
    def rules(self) -> RowRules:
        """The filters of the run."""
        return replace(RowRules.of(self.run), filtered=True)

    @property
    def total(self) -> int | None:
        """Pictures of this share, where that is known."""
        return self.source.total and -(-self.source.total // self.share.count)

    def settings(self, container: str) -> dict[str, Any]:
        """The facts that all workers on one folder must share, as JSON: units and filters, or places mean nothing."""
        units = hashlib.sha256(json.dumps(list(self.source.units)).encode()).hexdigest()
        filters = ("min_caption_length", "max_aspect_ratio", "nsfw_allowed")
        return {
            "format": 1,
            "vqgan": {
                key: value for key, value in DalleRun.of(self.run).vqgan.model_dump().items() if value is not None
            },
            "filters": {key: getattr(self.run.data, key) for key in filters},
            "source": {"units": len(self.source.units), "sha256": units, "pictures": self.source.total},
            "shares": self.share.count,
            "column": self.column,
            "container": container,
            "columns": ["caption", *self.fields, self.column],
        }

    def chosen(self, start: Place) -> Iterator[Chosen]:
        """This worker's pictures from a place on."""
        share, units = self.share, range(len(self.source.units))
        by_unit = len(units) >= share.count
        if by_unit:
            units = units[share.index :: share.count]
        for ordinal in range(start[0], len(units)):
            before = start[1] if ordinal == start[0] else 0
            try:
                for number, picture in enumerate(self.source.read(units[ordinal], before), before + 1):
                    if by_unit or (number - 1) % share.count == share.index:
                        yield (ordinal, number), picture, reason_against(picture, self.rules, self.fields)
            except DamagedUnit as error:
                yield (ordinal + 1, 0), None, Undecodable("damaged_file", str(error))

    def rows(
        self, pictures: Sequence[tuple[CaptionedPicture, Decoded]], encoder: Callable[[np.ndarray], np.ndarray]
    ) -> list[Row]:
        """The rows of decoded pictures."""
        if not pictures:
            return []
        codes = encoder(np.stack([decoded.pixels for _, decoded in pictures]))
        strings = to_column(self.column, codes, DalleRun.of(self.run).vqgan.codebook_size)
        rows = []
        for (picture, decoded), string in zip(pictures, strings, strict=True):
            width, height = _sizes(picture)
            sizes = {SIZES[0]: width or decoded.width, SIZES[1]: height or decoded.height}
            known = {LABEL: picture.fields.get(LABEL), **sizes}
            rows.append({"caption": picture.caption, **{key: known[key] for key in self.fields}, self.column: string})
        return rows


def choose_batch(device: torch.device, pixels: int) -> tuple[int, str]:
    """The number of pictures to encode side by side, and the reason in words."""
    if device.type == "cpu":
        batch = max(4, min(64, 2**18 // pixels**2))
        return batch, f"{batch} pictures at a time: a kill costs some seconds of a CPU's work at most"
    free, _ = torch.cuda.mem_get_info(device)
    bytes_each = GPU_PICTURE_BYTES * pixels**2 / 256**2
    batch = 1 << max(0, min(6, int(free / 2 / bytes_each).bit_length() - 1))
    room = f"{free / 1e9:.1f} GB of the GPU's memory are free, {bytes_each / 1e6:.0f} MB each"
    return batch, f"{batch} pictures at a time: {room}"


class PictureEncoder:
    """The VQGAN (`model.vqgan`), which lies on `device`: pixels to codes."""

    def __init__(self, vqgan: Any, device: torch.device):
        if not vqgan.has_encoder:
            raise TTError("these VQGAN weights hold the decoder only: pictures cannot be encoded with them")
        self._vqgan, self._device = vqgan, device

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Pictures (b, side, side, 3) uint8 → codes (b, n) int16. Halves the batch when the GPU's memory is short."""
        try:
            pictures = torch.from_numpy(pixels).to(self._device).permute(0, 3, 1, 2).float().div_(255)
            return np.asarray(self._vqgan.encode(pictures).to(torch.int16).cpu())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(pixels) == 1:
                raise TTError("the GPU's memory is too small for one picture; use --device cpu") from None
        torch.cuda.empty_cache()
        half = len(pixels) // 2
        return np.concatenate([self(pixels[:half]), self(pixels[half:])])


def encode(
    job: EncodingJob,
    encoder: Callable[[np.ndarray], np.ndarray],
    journal: Journal,
    on_progress: Callable[[EncodingProgress], None] = lambda progress: None,
) -> EncodingProgress:
    """Encode what `journal` says is left of this worker's part, and seal the last shard.

    encoder: pictures (b, side, side, 3) uint8 → codes (b, n). on_progress: is called after the first batch and about
    once a second. Raises TTError when the disk is full or the source is lost; then, as after a kill, another call with
    an equal source goes on.
    """
    started, reported, seen_before = time.monotonic(), -math.inf, journal.counts["seen"]

    def progress() -> EncodingProgress:
        seconds, seen, shards = time.monotonic() - started, journal.counts["seen"], journal.finished.shards
        speed = (seen - seen_before) / seconds if seconds else 0.0
        left = max(0, job.total - seen) / speed if job.total is not None and speed else None
        size = sum(shard.bytes for shard in shards)
        return EncodingProgress(dict(journal.counts), len(shards), size, seconds, speed, left)

    if journal.finished.done:
        return progress()
    if journal.full:
        journal.seal()
    batch = _Batch()
    with DecoderPool(job.workers, DalleRun.of(job.run).vqgan.pixels) as decoders:
        for place, picture, result in decoders(job.chosen(journal.place), 2 * job.batch + 4 * job.workers):
            batch.add(place, picture, result, job.rules)
            if len(batch.pictures) >= job.batch or batch.seen >= MOST_UNRECORDED:
                journal.record(place, job.rows(batch.pictures, encoder), batch.counts, batch.broken)
                batch = _Batch()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    on_progress(progress())
            if journal.full:
                journal.seal()
    if batch.place is not None:
        journal.record(batch.place, job.rows(batch.pictures, encoder), batch.counts, batch.broken)
    journal.seal(done=True)
    return progress()


@dataclass
class _Batch:
    """Pictures that wait for the VQGAN, and what else happened since the last record."""

    pictures: list[tuple[CaptionedPicture, Decoded]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, str]] = field(default_factory=list)
    place: Place | None = None
    seen: int = 0

    def add(
        self, place: Place, picture: CaptionedPicture | None, result: Decoded | Undecodable | str, rules: RowRules
    ) -> None:
        self.place = place
        self.seen += 1
        if picture is not None:
            self.counts["seen"] += 1
        if isinstance(result, Decoded) and picture is not None:
            if rules.against_shape(result.width, result.height) is None:
                self.counts["kept"] += 1
                self.pictures.append((picture, result))
                return
            result = "aspect_ratio"
        if isinstance(result, Undecodable):
            name = picture.name if picture else ""
            self.broken.append({"picture": name, "reason": result.reason, "words": result.words})
            result = result.reason
        self.counts[str(result)] += 1

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
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tt_cli.data.codes import CODE, to_column
from tt_cli.data.build.decoder_pool import Chosen, DecoderPool
from tt_cli.data.columns import LABEL, SIZES, Row
from tt_cli.data.row_rules import RowRules
from tt_cli.data.build.picture_decoding import Decoded, Undecodable
from tt_cli.data.build.journal import Journal, Place
from tt_cli.data.build.picture_sources import DamagedUnit, CaptionedPicture, PictureSource
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig

if TYPE_CHECKING:
    import torch


MOST_UNRECORDED = 512  # pictures that are left out one after the other, before that is recorded too
TOLD_SECONDS = 1.0
GPU_PICTURE_BYTES = 170e6  # of activations, for 256 x 256 pixels in float32
FIELDS = (LABEL, *SIZES)


@dataclass(frozen=True)
class WorkShare:
    """Worker `index` (from 0) of `count`: a share of the units, or of all their pictures where there are fewer."""

    index: int = 0
    count: int = 1

    def units(self, source: PictureSource) -> list[int]:
        """The numbers of the units that this worker looks at."""
        everything = range(len(source.units))
        return list(everything[self.index :: self.count] if self._by_unit(source) else everything)

    def has(self, source: PictureSource, number: int) -> bool:
        """True if picture `number` of one of its units is this worker's."""
        return self._by_unit(source) or number % self.count == self.index

    def _by_unit(self, source: PictureSource) -> bool:
        return len(source.units) >= self.count


LEFT_OUT = {
    "no_caption": "no caption",
    "short_caption": "caption too short",
    "not_utf8": "caption not UTF-8",
    "nsfw": "label not allowed",
    "aspect_ratio": "too long or too high",
    "missing": "no picture",
    "too_large": "picture too large",
    "broken": "picture broken",
    "damaged_file": "files of the source damaged",
}
"""Reasons for which a picture is left out, in words."""


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
            "seen": self.counts.get("seen", 0),
            "kept": self.counts.get("kept", 0),
            "left_out": {key: self.counts[key] for key in LEFT_OUT if self.counts.get(key)},
            "shards": self.shards,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "per_second": round(self.per_second, 3),
            "eta_s": None if self.eta is None else round(self.eta, 1),
        }


def reason_against(picture: CaptionedPicture, rules: RowRules) -> str | None:
    """The reason for which the run's filters leave a picture out before it is decoded, None if they do not."""
    if (reason := rules.against_caption(picture.caption)) is not None:
        return reason
    if "NSFW" in picture.fields and picture.fields["NSFW"] not in rules.nsfw_allowed:
        return "nsfw"
    width, height = _sizes(picture)
    if width and (reason := rules.against_shape(width, height)) is not None:
        return reason
    return None if picture.content else "missing"


def _sizes(picture: CaptionedPicture) -> tuple[int, int]:
    """The sides of the original, as the source says; zeros where it does not."""
    width, height = (picture.fields.get(key, 0) for key in SIZES)
    return (width, height) if width > 0 and height > 0 else (0, 0)


def first_picture(source: PictureSource) -> CaptionedPicture:
    """The first of the source that can be read, whoever it belongs to. Raises UsageError where there is none."""
    for unit in range(len(source.units)):
        try:
            picture = next(source.read(unit, 0), None)
        except DamagedUnit:
            continue
        if picture is not None:
            return picture
    raise UsageError("the source has no picture at all; give a folder, tars, a table or a data set that has")


def fields_of(first: CaptionedPicture) -> tuple[str, ...]:
    """The columns of the rows beside caption and codes: a label only where the source has labels."""
    return FIELDS if "NSFW" in first.fields else FIELDS[1:]


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
        """The facts that all workers on one folder must share, as JSON: units and filters too, or places mean nothing."""
        units = hashlib.sha256(json.dumps(list(self.source.units)).encode()).hexdigest()
        filters = ("min_caption_length", "max_aspect_ratio", "nsfw_allowed")
        return {
            "format": 1,
            "vqgan": {key: value for key, value in self.run.vqgan.model_dump().items() if value is not None},
            "filters": {key: getattr(self.run.data, key) for key in filters},
            "source": {"units": len(self.source.units), "sha256": units, "pictures": self.source.total},
            "shares": self.share.count,
            "column": self.column,
            "container": container,
            "columns": ["caption", *self.fields, self.column],
        }

    def chosen(self, start: Place) -> Iterator[Chosen]:
        """This worker's pictures from a place on."""
        units = self.share.units(self.source)
        for ordinal in range(start[0], len(units)):
            number = start[1] if ordinal == start[0] else 0
            try:
                for picture in self.source.read(units[ordinal], number):
                    number += 1
                    if self.share.has(self.source, number - 1):
                        yield (ordinal, number), picture, reason_against(picture, self.rules)
            except DamagedUnit as error:
                yield (ordinal + 1, 0), None, Undecodable("damaged_file", str(error))


def choose_batch(device: torch.device, pixels: int) -> tuple[int, str]:
    """The number of pictures to encode side by side, and the reason in words."""
    if device.type == "cpu":
        batch = max(4, min(64, 2**18 // pixels**2))
        return batch, f"{batch} pictures at a time: a kill costs some seconds of a CPU's work at most"
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    bytes_each = GPU_PICTURE_BYTES * pixels**2 / 256**2
    batch = 1 << max(0, min(6, int(free / 2 / bytes_each).bit_length() - 1))
    return (
        batch,
        f"{batch} pictures at a time: {free / 1e9:.1f} GB of the GPU's memory are free, {bytes_each / 1e6:.0f} MB each",
    )


class VqEncoder(Protocol):
    """The part of a VQGAN that this room needs."""

    @property
    def has_encoder(self) -> bool:
        """True if its weights hold the encoder too."""

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """Pictures (b, 3, side, side) in 0..1 → codes (b, n)."""


class PictureEncoder:
    """The VQGAN, which lies on `device`: pixels to codes."""

    def __init__(self, vqgan: VqEncoder, device: torch.device, codebook_size: int):
        if not vqgan.has_encoder:
            raise TTError("these VQGAN weights hold the decoder only: pictures cannot be encoded with them")
        self._vqgan, self._device, self._codebook_size = vqgan, device, codebook_size

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Pictures (b, side, side, 3) uint8 → codes (b, n) int16. Halves the batch when the GPU's memory is short."""
        import torch

        try:
            pictures = torch.from_numpy(pixels).to(self._device).permute(0, 3, 1, 2).float().div_(255)
            return self._vqgan.encode(pictures).to(torch.int16).cpu().numpy()
        except torch.cuda.OutOfMemoryError:
            if len(pixels) == 1:
                raise TTError("the GPU's memory is too small for one picture; use --device cpu") from None
        torch.cuda.empty_cache()
        half = len(pixels) // 2
        return np.concatenate([self(pixels[:half]), self(pixels[half:])])


def encode(
    job: EncodingJob,
    encoder: Callable[[np.ndarray], np.ndarray],
    journal: Journal,
    tell: Callable[[EncodingProgress], None] = lambda progress: None,
) -> EncodingProgress:
    """Encode what `journal` says is left of this worker's part, and seal the last shard.

    encoder: pictures (b, side, side, 3) uint8 → codes (b, n). tell: is called after the first batch and about once a
    second. Raises TTError when the disk is full or the source is lost; then, as after a kill, another call with an
    equal source goes on.
    """
    clock = _Clock(journal, job.total, tell)
    if journal.finished.done:
        return clock.progress()
    if journal.full:
        journal.seal()
    with DecoderPool(job.workers, job.run.vqgan.pixels) as decoders:
        waiting = _Batch(job, encoder, journal)
        for place, picture, result in decoders(job.chosen(journal.place), 2 * job.batch + 4 * job.workers):
            waiting.add(place, picture, result)
            if len(waiting.pictures) >= job.batch or waiting.seen >= MOST_UNRECORDED:
                waiting.record()
                clock.tell()
            if journal.full:
                journal.seal()
        waiting.record()
    journal.seal(done=True)
    return clock.progress()


class _Batch:
    """Pictures that wait for the VQGAN, and what else happened since the last record."""

    def __init__(self, job: EncodingJob, encoder: Callable[[np.ndarray], np.ndarray], journal: Journal):
        self._job, self._encoder, self._journal = job, encoder, journal
        self._clear()

    def _clear(self) -> None:
        self.pictures: list[tuple[CaptionedPicture, Decoded]] = []
        self.counts: Counter[str] = Counter()
        self.broken: list[dict[str, str]] = []
        self.place: Place | None = None
        self.seen = 0

    def add(self, place: Place, picture: CaptionedPicture | None, result: Decoded | Undecodable | str) -> None:
        self.place = place
        self.seen += 1
        if picture is not None:
            self.counts["seen"] += 1
        if isinstance(result, Decoded) and picture is not None:
            if self._job.rules.against_shape(result.width, result.height) is None:
                self.counts["kept"] += 1
                self.pictures.append((picture, result))
                return
            result = "aspect_ratio"
        if isinstance(result, Undecodable):
            name = picture.name if picture else ""
            self.broken.append({"picture": name, "reason": result.reason, "words": result.words})
            result = result.reason
        self.counts[str(result)] += 1

    def record(self) -> None:
        if self.place is None:
            return
        self._journal.record(self.place, self._rows(), self.counts, self.broken)
        self._clear()

    def _rows(self) -> list[Row]:
        if not self.pictures:
            return []
        codes = self._encoder(np.stack([decoded.pixels for _, decoded in self.pictures]))
        strings = to_column(self._job.column, codes, self._job.run.vqgan.codebook_size)
        return [
            self._row(picture, decoded) | {self._job.column: string}
            for (picture, decoded), string in zip(self.pictures, strings, strict=True)
        ]

    def _row(self, picture: CaptionedPicture, decoded: Decoded) -> Row:
        width, height = _sizes(picture)
        known: dict[str, Any] = {
            "NSFW": picture.fields.get("NSFW"),
            "original_width": width or decoded.width,
            "original_height": height or decoded.height,
        }
        return {"caption": picture.caption, **{key: known[key] for key in self._job.fields}}


class _Clock:
    """Says now and then how far a worker is."""

    def __init__(self, journal: Journal, total: int | None, tell: Callable[[EncodingProgress], None]):
        self._journal, self._total, self._tell = journal, total, tell
        self._started, self._reported = time.monotonic(), -math.inf  # the first batch is told at once
        self._seen_before = journal.counts["seen"]

    def tell(self) -> None:
        if time.monotonic() - self._reported >= TOLD_SECONDS:
            self._reported = time.monotonic()
            self._tell(self.progress())

    def progress(self) -> EncodingProgress:
        seconds = time.monotonic() - self._started
        seen = self._journal.counts["seen"]
        speed = (seen - self._seen_before) / seconds if seconds else 0.0
        left = max(0, self._total - seen) / speed if self._total is not None and speed else None
        shards = self._journal.finished.shards
        return EncodingProgress(dict(self._journal.counts), len(shards), sum(shard.bytes for shard in shards), seconds, speed, left)


def cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0))

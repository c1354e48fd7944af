"""Pictures with captions to shards of codes: the way of `tt data encode`.

    source → filters → decoding, in worker processes → VQGAN, in batches → journal → shards

Notable:
- results are taken in the order of the source, so a place in it says all about what is done: see `journal`;
- no picture ends the work: what cannot be used is counted by its reason, and listed if it is broken. A worker process
  that a picture kills is replaced, and the picture is found by decoding those in question one at a time;
- codes are the mode of the VQGAN's distribution, so the same picture has the same codes on every machine, up to near
  ties.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tt_cli.data.codes import to_column
from tt_cli.data.columns import Row
from tt_cli.data.build.picture_decoding import Decoded, Undecodable, decode, end_with
from tt_cli.data.build.journal import Journal, Place
from tt_cli.data.build.picture_sources import DamagedUnit, CaptionedPicture, PictureSource
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig

if TYPE_CHECKING:
    import torch


MOST_UNRECORDED = 512  # pictures that are left out one after the other, before that is recorded too
TOLD_SECONDS = 1.0
GPU_PICTURE_BYTES = 170e6  # of activations, for 256 x 256 pixels in float32
FIELDS = ("NSFW", "original_width", "original_height")


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
        """Whether picture `number` of one of its units is this worker's."""
        return self._by_unit(source) or number % self.count == self.index

    def _by_unit(self, source: PictureSource) -> bool:
        return len(source.units) >= self.count


@dataclass(frozen=True)
class EncodingProgress:
    """How far this worker is. counts: see `reason_against`, and "seen" and "kept". seconds: of this start.

    eta: seconds that are left at this speed, None where the number of pictures is not known.
    """

    counts: Mapping[str, int]
    shards: int
    bytes: int
    seconds: float
    per_second: float
    eta: float | None


def reason_against(picture: CaptionedPicture, run: RunConfig) -> str | None:
    """Why the run's filters leave a picture out before it is decoded, None if they do not."""
    caption = picture.caption
    if isinstance(caption, bytes) or (isinstance(caption, str) and not _is_unicode(caption)):
        return "not_utf8"
    if not isinstance(caption, str) or not caption.strip():
        return "no_caption"
    if len(caption) < run.data.min_caption_length:
        return "short_caption"
    if "NSFW" in picture.fields and picture.fields["NSFW"] not in run.data.nsfw_allowed:
        return "nsfw"
    width, height = _sizes(picture)
    if width and _too_long(width, height, run):
        return "aspect_ratio"
    return None if picture.content else "missing"


def _sizes(picture: CaptionedPicture) -> tuple[int, int]:
    """Of the original, as the source says; zeros where it does not."""
    width, height = (picture.fields.get(key, 0) for key in ("original_width", "original_height"))
    return (width, height) if width > 0 and height > 0 else (0, 0)


def _too_long(width: int, height: int, run: RunConfig) -> bool:
    return max(width, height) > run.data.max_aspect_ratio * min(width, height)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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


def settings(
    run: RunConfig, source: PictureSource, part: WorkShare, column: str, container: str, fields: tuple[str, ...]
) -> dict[str, Any]:
    """What all workers on one folder must have in common, as JSON: units and filters too, or places mean nothing."""
    units = hashlib.sha256(json.dumps(list(source.units)).encode()).hexdigest()
    return {
        "format": 1,
        "vqgan": {key: value for key, value in run.vqgan.model_dump().items() if value is not None},
        "filters": {key: getattr(run.data, key) for key in ("min_caption_length", "max_aspect_ratio", "nsfw_allowed")},
        "source": {"units": len(source.units), "sha256": units, "pictures": source.total},
        "shares": part.count,
        "column": column,
        "container": container,
        "columns": ["caption", *fields, column],
    }


def choose_batch(device: torch.device, pixels: int) -> tuple[int, str]:
    """How many pictures to encode side by side, and why, in words."""
    if device.type == "cpu":
        batch = max(4, min(64, 2**18 // pixels**2))
        return batch, f"{batch} pictures at a time: a kill costs some seconds of a CPU's work at most"
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    each = GPU_PICTURE_BYTES * pixels**2 / 256**2
    batch = 1 << max(0, min(6, int(free / 2 / each).bit_length() - 1))
    return (
        batch,
        f"{batch} pictures at a time: {free / 1e9:.1f} GB of the GPU's memory are free, {each / 1e6:.0f} MB each",
    )


class VqEncoder(Protocol):
    """What this room needs of a VQGAN."""

    @property
    def has_encoder(self) -> bool:
        """Whether its weights hold the encoder too."""

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
    source: PictureSource,
    run: RunConfig,
    encoder: Callable[[np.ndarray], np.ndarray],
    journal: Journal,
    *,
    part: WorkShare = WorkShare(),
    column: str = "code",
    fields: tuple[str, ...] = FIELDS,
    batch: int = 4,
    workers: int = 1,
    tell: Callable[[EncodingProgress], None] = lambda progress: None,
) -> EncodingProgress:
    """Encode what `journal` says is left of this worker's part, and seal the last shard.

    encoder: pictures (b, side, side, 3) uint8 → codes (b, n). fields: columns of the rows beside caption and codes.
    tell: is called after the first batch and about once a second. Raises TTError when the disk is full or the source is
    lost; then, as after a kill, another call with an equal source goes on.
    """
    clock = _Clock(journal, source.total and -(-source.total // part.count), tell)
    if journal.finished.done:
        return clock.progress()
    if journal.full:
        journal.seal()
    with _Decoders(workers, run.vqgan.pixels) as decoders:
        waiting = _Batch(journal, encoder, run, column, fields)
        for place, picture, found in decoders(_chosen(source, part, journal.place, run), 2 * batch + 4 * workers):
            waiting.add(place, picture, found)
            if len(waiting.pictures) >= batch or waiting.seen >= MOST_UNRECORDED:
                waiting.record()
                clock.tell()
            if journal.full:
                journal.seal()
        waiting.record()
    journal.seal(done=True)
    return clock.progress()


Found = Decoded | Undecodable | str
"""What became of a picture: its pixels, what is wrong with the file, or the filter that left it out."""


def _chosen(
    source: PictureSource, part: WorkShare, start: Place, run: RunConfig
) -> Iterator[tuple[Place, CaptionedPicture | None, str | Undecodable | None]]:
    """This worker's pictures from a place on, each with the place after it and why it is left out, or None."""
    units = part.units(source)
    for ordinal in range(start[0], len(units)):
        number = start[1] if ordinal == start[0] else 0
        try:
            for picture in source.read(units[ordinal], number):
                number += 1
                if part.has(source, number - 1):
                    yield (ordinal, number), picture, reason_against(picture, run)
        except DamagedUnit as error:
            yield (ordinal + 1, 0), None, Undecodable("damaged_file", str(error))


class _Batch:
    """Pictures that wait for the VQGAN, and what else happened since the last record."""

    def __init__(
        self,
        journal: Journal,
        encoder: Callable[[np.ndarray], np.ndarray],
        run: RunConfig,
        column: str,
        fields: tuple[str, ...],
    ):
        self._journal, self._encoder, self._run, self._column, self._fields = journal, encoder, run, column, fields
        self._clear()

    def _clear(self) -> None:
        self.pictures: list[tuple[CaptionedPicture, Decoded]] = []
        self.counts: Counter[str] = Counter()
        self.broken: list[dict[str, str]] = []
        self.place: Place | None = None
        self.seen = 0

    def add(self, place: Place, picture: CaptionedPicture | None, found: Found) -> None:
        self.place = place
        self.seen += 1
        if picture is not None:
            self.counts["seen"] += 1
        if isinstance(found, Decoded) and picture is not None:
            if not _too_long(found.width, found.height, self._run):
                self.counts["kept"] += 1
                self.pictures.append((picture, found))
                return
            found = "aspect_ratio"
        if isinstance(found, Undecodable):
            self.broken.append(
                {"picture": picture.name if picture else "", "reason": found.reason, "words": found.words}
            )
            found = found.reason
        self.counts[str(found)] += 1

    def record(self) -> None:
        if self.place is None:
            return
        self._journal.record(self.place, self._rows(), self.counts, self.broken)
        self._clear()

    def _rows(self) -> list[Row]:
        if not self.pictures:
            return []
        codes = self._encoder(np.stack([found.pixels for _, found in self.pictures]))
        strings = to_column(self._column, codes, self._run.vqgan.codebook_size)
        return [
            self._row(picture, found) | {self._column: one}
            for (picture, found), one in zip(self.pictures, strings, strict=True)
        ]

    def _row(self, picture: CaptionedPicture, found: Decoded) -> Row:
        width, height = _sizes(picture)
        known: dict[str, Any] = {
            "NSFW": picture.fields.get("NSFW"),
            "original_width": width or found.width,
            "original_height": height or found.height,
        }
        return {"caption": picture.caption, **{key: known[key] for key in self._fields}}


class _Decoders:
    """Worker processes that decode pictures, and what they found in the order in which it was asked for."""

    def __init__(self, workers: int, side: int):
        self._workers, self._side = workers, side
        self._pool = self._new(workers)

    def __enter__(self) -> _Decoders:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _new(workers: int) -> ProcessPoolExecutor:
        import multiprocessing

        # A server that has loaded what is needed forks the workers: it knows no threads and no GPU.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tt_cli.data.build.picture_decoding", "PIL.Image"])
        return ProcessPoolExecutor(workers, mp_context=context, initializer=end_with, initargs=(os.getpid(),))

    def __call__(
        self, chosen: Iterator[tuple[Place, CaptionedPicture | None, str | Undecodable | None]], ahead: int
    ) -> Iterator[tuple[Place, CaptionedPicture | None, Found]]:
        """At most `ahead` pictures are decoded before their turn."""
        waiting: deque[tuple[Place, CaptionedPicture | None, str | Undecodable | Future[Decoded | Undecodable]]] = deque()
        for place, picture, reason in chosen:
            waiting.append((place, picture, reason if reason is not None else self._asked(picture, waiting)))
            if len(waiting) >= ahead:
                yield self._answered(waiting)
        while waiting:
            yield self._answered(waiting)

    def _asked(self, picture: CaptionedPicture | None, waiting: deque[Any]) -> Future[Decoded | Undecodable]:
        assert picture is not None and picture.content is not None
        try:
            return self._pool.submit(decode, picture.content, self._side)
        except BrokenProcessPool:
            self._replace(waiting)
            return self._pool.submit(decode, picture.content, self._side)

    def _answered(self, waiting: deque[Any]) -> tuple[Place, CaptionedPicture | None, Found]:
        place, picture, found = waiting.popleft()
        if not isinstance(found, Future):
            return place, picture, found
        try:
            return place, picture, found.result()
        except BrokenProcessPool:
            waiting.appendleft((place, picture, found))
            self._replace(waiting)
            return self._answered(waiting)

    def _replace(self, waiting: deque[Any]) -> None:
        """A process has died, and the pool with it: decode what is not done one at a time, to find who did it."""
        self._pool.shutdown(cancel_futures=True)
        alone = self._new(1)
        for index, (place, picture, found) in enumerate(waiting):
            if not isinstance(found, Future) or _succeeded(found):
                continue
            try:
                answer = alone.submit(decode, picture.content, self._side).result()
            except BrokenProcessPool:
                answer = Undecodable("broken", "decoding it ends the process")
                alone.shutdown()
                alone = self._new(1)
            waiting[index] = (place, picture, answer)
        alone.shutdown()
        self._pool = self._new(self._workers)


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class _Clock:
    """Says now and then how far a worker is."""

    def __init__(self, journal: Journal, total: int | None, tell: Callable[[EncodingProgress], None]):
        self._journal, self._total, self._tell = journal, total, tell
        self._started, self._told = time.monotonic(), -math.inf  # the first batch is told at once
        self._seen_before = journal.counts["seen"]

    def tell(self) -> None:
        if time.monotonic() - self._told >= TOLD_SECONDS:
            self._told = time.monotonic()
            self._tell(self.progress())

    def progress(self) -> EncodingProgress:
        seconds = time.monotonic() - self._started
        seen = self._journal.counts["seen"]
        speed = (seen - self._seen_before) / seconds if seconds else 0.0
        left = max(0, self._total - seen) / speed if self._total is not None and speed else None
        shards = self._journal.finished.shards
        return EncodingProgress(dict(self._journal.counts), len(shards), sum(one.bytes for one in shards), seconds, speed, left)


def cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0))

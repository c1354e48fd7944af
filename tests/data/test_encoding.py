"""From pictures to shards: the filters, the counts, and that a kill at any instant loses and repeats nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.dying import dying_decode
from data.rows import row, rows_in, run_on
from testbed.full_disk import full_after

from tt_cli.data.build import decoder_pool
from tt_cli.data.build import encoder as encoding
from tt_cli.data.build.encoder import EncodingJob, WorkShare, encode, fields_of, reason_against
from tt_cli.data.build.journal import Journal, agree_on
from tt_cli.data.build.picture_decoding import Decoded, Undecodable
from tt_cli.data.build.picture_sources import CaptionedPicture, DamagedUnit
from tt_cli.data.examples import RowFilter
from tt_cli.data.row_rules import RowRules
from tt_cli.data.shard_format import CONTAINERS
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig, load_run

pytestmark = pytest.mark.slow

ALL = WorkShare()


def picture(number: int, **changes: Any) -> CaptionedPicture:
    """A picture whose content says what its codes will be; `decoded` reads it."""
    fields = {"NSFW": "UNLIKELY", "original_width": 640, "original_height": 480, **changes}
    caption = fields.pop("caption", f"row {number}")
    content = fields.pop("content", b"%d" % number)
    return CaptionedPicture(
        f"p{number}", caption, content, {key: value for key, value in fields.items() if value is not ...}
    )


def decoded(content: bytes, side: int) -> Decoded | Undecodable:
    if not content.isdigit():
        return Undecodable("broken", content.decode())
    return Decoded(np.full((side, side, 3), int(content) % 256, np.uint8), 64 + int(content) // 100 * 100, 64)


def encoder(pixels: np.ndarray) -> np.ndarray:
    digits = pixels[:, 0, 0, 0].astype(np.int16)
    return np.stack([digits % 10, digits // 10 % 10, digits // 100 % 10, digits * 0 + 7], axis=1)


class Units:
    """A source of lists of pictures; None among them is a damage."""

    total = None

    def __init__(self, *units: Sequence[CaptionedPicture | None]):
        self._units = units
        self.units = [f"unit {number}" for number in range(len(units))]

    def read(self, unit: int, skip: int) -> Iterator[CaptionedPicture]:
        for one in self._units[unit][skip:]:
            if one is None:
                raise DamagedUnit(f"unit {unit} cannot be read to its end")
            yield one


class InProcess:
    """Decodes when asked, in this process."""

    def __init__(self, workers: int, side: int):
        self._side = side

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __call__(self, chosen: Any, ahead: int) -> Iterator[Any]:
        for place, one, reason in chosen:
            yield place, one, decoded(one.content, self._side) if reason is None else reason


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(encoding, "DecoderPool", InProcess)
    return run_on("any")


def do(
    run: RunConfig,
    out: Path,
    source: Any,
    part: WorkShare = ALL,
    container: str = ".parquet",
    target: int = 500,
    **how: Any,
) -> encoding.EncodingProgress:
    """What the command does."""
    job = EncodingJob(source, run, part, fields=fields_of(source), **how)
    agree_on(out, job.settings(container))
    journal = Journal(out, part.index, container, target)
    try:
        return encode(job, encoder, journal)
    finally:
        journal.close()


def captions_in(out: Path) -> list[str]:
    return [found["caption"] for found in rows_in(out)]


MIXED = [
    *(picture(i) for i in range(20)),
    picture(20, caption="ox"),
    picture(21, caption=b"caf\xe9"),
    picture(22, content=b"this is broken"),
    picture(23, content=None),
    picture(24, NSFW="NSFW"),
    picture(25, original_width=9000),
    picture(26, caption=None),
    picture(150, original_width=...),  # its pixels are 164 wide and 64 high
    *(picture(i) for i in range(30, 50)),
]
KEPT = [f"row {i}" for i in (*range(20), *range(30, 50))]
LEFT_OUT = {
    "short_caption": 1, "not_utf8": 1, "broken": 1, "missing": 1, "nsfw": 1, "no_caption": 1, "aspect_ratio": 2
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
def test_kept_rows_are_in_shards_and_others_are_counted(tmp_path: Path, run: RunConfig, container: str) -> None:
    target = 500 if container != ".tar" else 20_000
    progress = do(run, tmp_path, Units(MIXED), container=container, target=target, batch=3)
    assert captions_in(tmp_path) == KEPT
    assert progress.counts == {"seen": len(MIXED), "kept": 40, **LEFT_OUT}
    assert len(list((tmp_path / "data").iterdir())) == progress.shards >= 3
    first = rows_in(tmp_path)[12]
    assert first == row(caption="row 12", code=np.array([2, 1, 0, 7], "<i2").tobytes())
    broken = [json.loads(line) for line in (tmp_path / "broken-000.jsonl").read_text().splitlines()]
    assert broken == [{"picture": "p22", "reason": "broken", "words": "this is broken"}]


def test_the_packed_column(tmp_path: Path, run: RunConfig) -> None:
    do(run, tmp_path, Units([picture(12)]), column="code13")
    assert [found["code13"] for found in rows_in(tmp_path)] == [(2 + (1 << 4) + (7 << 12)).to_bytes(2, "little")]


def test_a_source_without_labels_gets_no_column_of_labels(tmp_path: Path, run: RunConfig) -> None:
    do(run, tmp_path, Units([picture(1, NSFW=...), picture(2)]))
    assert [set(found) for found in rows_in(tmp_path)] == [{"caption", "original_width", "original_height", "code"}] * 2


def test_what_training_would_not_take_is_not_kept(tmp_path: Path, run: RunConfig) -> None:
    """A picture without a label, in a source of labels."""
    progress = do(run, tmp_path, Units([picture(1), picture(2, NSFW=...), picture(3, NSFW=None)]))
    assert progress.counts == {"seen": 3, "kept": 1, "nsfw": 2}
    row_filter = RowFilter(RowRules.of(run))
    assert row_filter.sift(rows_in(tmp_path))[0] == ["row 1"] and not row_filter.counts.problems()


def test_a_damaged_file_is_listed_and_the_others_go_on(tmp_path: Path, run: RunConfig) -> None:
    progress = do(run, tmp_path, Units([picture(1), None], [None], [picture(2)]))
    assert captions_in(tmp_path) == ["row 1", "row 2"]
    assert progress.counts == {"seen": 2, "kept": 2, "damaged_file": 2}
    assert len((tmp_path / "broken-000.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("shares", [1, 2, 3, 5, 8])
def test_shares_are_everything_once(tmp_path: Path, run: RunConfig, shares: int) -> None:
    units = [[picture(10 * unit + i) for i in range(unit + 2)] for unit in range(3)]
    for index in range(shares):
        do(run, tmp_path, Units(*units), WorkShare(index, shares))
    assert Counter(captions_in(tmp_path)) == Counter(one.caption for unit in units for one in unit)


def test_once_more_does_nothing(tmp_path: Path, run: RunConfig) -> None:
    first = do(run, tmp_path, Units(MIXED))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = do(run, tmp_path, Units(MIXED))
    assert again.counts == first.counts
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_way_of_working_on_the_same_folder_is_refused(tmp_path: Path, run: RunConfig) -> None:
    do(run, tmp_path, Units(MIXED))
    with pytest.raises(UsageError, match="was begun with column 'code', not 'code13'"):
        do(run, tmp_path, Units(MIXED), column="code13")
    with pytest.raises(UsageError, match="was begun with filters"):
        do(run_on("any", min_caption_length=1), tmp_path, Units(MIXED))
    with pytest.raises(UsageError, match="was begun with source"):
        do(run, tmp_path, Units(MIXED, MIXED))


def test_a_disk_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    agree_on(tmp_path, {"shares": 1})
    assert sorted(os.listdir(tmp_path)) == ["data", "encode.json", "progress"]
    with pytest.raises(UsageError, match="was begun with shares 1, not 2"):
        agree_on(tmp_path, {"shares": 2})


def test_two_at_once_are_refused(tmp_path: Path, run: RunConfig) -> None:
    agree_on(tmp_path, {})
    journal = Journal(tmp_path, 0, ".parquet")
    with pytest.raises(UsageError, match="another process encodes this part"):
        Journal(tmp_path, 0, ".parquet")
    journal.close()
    Journal(tmp_path, 0, ".parquet").close()


def test_an_empty_source_is_refused(run: RunConfig) -> None:
    for source in (Units([]), Units([None], [])):
        with pytest.raises(UsageError, match="the source has no picture at all"):
            fields_of(source)


# ---------------------------------------------------------------- killed at any instant


INSTANTS = ("fsync", "replace", "ftruncate", "write", "open")


def killed_at(instant: int, before: bool, action: Any) -> bool:
    """Do it in a child that kills itself before or after its `instant`-th call that changes files. Whether it did."""
    child = os.fork()
    if child == 0:
        left = [instant]

        def counting(real: Any) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] == 0 and before:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*arguments, **more)
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        for name in INSTANTS:
            setattr(os, name, counting(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_instant_nothing_is_lost_or_there_twice(tmp_path: Path, run: RunConfig, seed: int) -> None:
    whole = tmp_path / "whole"
    expected = do(run, whole, Units(MIXED, MIXED), batch=4)
    rng = random.Random(seed)
    out = tmp_path / "out"
    kills = 0
    while killed_at(rng.randint(1, 25), rng.random() < 0.5, lambda: do(run, out, Units(MIXED, MIXED), batch=4)):
        kills += 1
    assert kills >= 3
    assert captions_in(out) == KEPT * 2
    assert do(run, out, Units(MIXED, MIXED), batch=4).counts == expected.counts
    for name in ("broken-000.jsonl", "progress/000.rows"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    for folder in ("data", "progress"):
        assert sorted(os.listdir(out / folder)) == sorted(os.listdir(whole / folder)), "and nothing lies about"


def test_what_was_encoded_is_not_encoded_again(tmp_path: Path, run: RunConfig) -> None:
    agree_on(tmp_path, {})
    seen: list[int] = []

    def some(pixels: np.ndarray) -> np.ndarray:
        if len(seen) >= 12:
            raise TTError("the GPU is gone")
        seen.extend(pixels[:, 0, 0, 0].tolist())
        return encoder(pixels)

    journal = Journal(tmp_path, 0, ".parquet")
    with pytest.raises(TTError, match="the GPU is gone"):
        encode(EncodingJob(Units(MIXED), run), some, journal)
    journal.close()
    journal = Journal(tmp_path, 0, ".parquet")
    assert [one["caption"] for one in journal.rows] == [f"row {i}" for i in range(12)]
    again: list[int] = []
    job = EncodingJob(Units(MIXED), run)
    encode(job, lambda pixels: (again.extend(pixels[:, 0, 0, 0].tolist()), encoder(pixels))[1], journal)
    journal.close()
    assert [*seen, *again] == [*range(20), *range(30, 50)]


@pytest.mark.parametrize("cut", [1, 7, 40, 200])
def test_a_torn_line_of_the_journal_does_not_count(tmp_path: Path, run: RunConfig, cut: int) -> None:
    agree_on(tmp_path, {})
    journal = Journal(tmp_path, 0, ".parquet")
    for number in range(3):
        journal.record((0, number + 1), [row(caption=f"row {number}")], {"seen": 1, "kept": 1}, [])
    journal.close()
    path = tmp_path / "progress/000.rows"
    path.write_bytes(path.read_bytes()[:-cut] + b"\0" * (cut // 2))
    journal = Journal(tmp_path, 0, ".parquet")
    assert journal.place == (0, journal.counts["seen"]) == (0, 2 if cut < 200 else 1)
    journal.record((0, 9), [row(caption="row 9")], {"seen": 1}, [])
    journal.close()
    journal = Journal(tmp_path, 0, ".parquet")
    assert journal.place == (0, 9) and journal.rows[-1]["caption"] == "row 9"
    journal.close()


def test_a_full_disk_is_one_line_and_work_goes_on_after_it(tmp_path: Path, run: RunConfig) -> None:
    with (
        pytest.raises(TTError, match=r"cannot write .*: File too large; raise the limit") as caught,
        full_after(3000),
    ):
        do(run, tmp_path, Units(MIXED), target=100_000, batch=2)
    assert "\n" not in str(caught.value)
    do(run, tmp_path, Units(MIXED), target=100_000, batch=2)
    assert captions_in(tmp_path) == KEPT


# ---------------------------------------------------------------- filters and the real decoders


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"caption": "cat"},
        {"caption": "ox"},
        {"caption": " \n"},
        {"caption": None},
        {"NSFW": "UNSURE"},
        {"NSFW": None},
        {"NSFW": ...},
        {"original_width": 200, "original_height": 100},
        {"original_width": 201, "original_height": 100},
        {"original_width": 100, "original_height": 201},
    ],
)
def test_the_filters_are_those_of_training(changes: dict[str, Any]) -> None:
    rules = RowRules.of(run_on("any"))
    assert reason_against(picture(1, **changes), rules) == RowFilter(rules).reason(row(**changes))


def test_more_reasons() -> None:
    rules = RowRules.of(run_on("any"))
    assert reason_against(picture(1, caption="a\ud800b"), rules) == "not_utf8"
    assert reason_against(picture(1, content=None), rules) == "missing"
    assert reason_against(picture(1, original_width=0), rules) is None, "the picture itself will say"
    lenient = RowRules.of(run_on("any", min_caption_length=0, max_aspect_ratio=9.0, nsfw_allowed=["NSFW"]))
    assert reason_against(picture(1, caption="x", NSFW="NSFW", original_width=4000), lenient) is None


def test_a_picture_that_kills_its_process_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real worker processes, and one picture's decoding ended by a signal."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 40), (200, 0, 0)).save(file, "PNG")
    monkeypatch.setattr(decoder_pool, "decode", dying_decode)
    pictures = [picture(i, content=b"die" if i in (3, 4) else file.getvalue()) for i in range(10)]
    run = load_run("emoji")
    agree_on(tmp_path, {})
    journal = Journal(tmp_path, 0, ".parquet")
    job = EncodingJob(Units(pictures), run, workers=2)
    progress = encode(job, lambda pixels: pixels[:, :8, :8, 0] * 0 + 5, journal)
    journal.close()
    assert progress.counts == {"seen": 10, "kept": 8, "broken": 2}
    assert captions_in(tmp_path) == [f"row {i}" for i in range(10) if i not in (3, 4)]

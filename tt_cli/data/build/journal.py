"""Journal of the work of one process of `tt data encode` or `tokenize`, on the disk, so that it can be killed any time.

In the output folder, for worker 0:

| file                        | content                                                                               |
|-----------------------------|---------------------------------------------------------------------------------------|
| `data/train-000-00007.parquet` | a finished shard; it appears when all of it is on the disk                         |
| `progress/000.json`         | what is finished: the shards, the counts, the place in the source; replaced as a whole |
| `progress/000.rows`         | the rows since then, one line for each batch, each line on the disk before the next    |
| `broken-000.jsonl`          | the pictures that could not be used, one JSON object a line                            |
| `SHA256SUMS`                | all shards, once every share is finished: what readers over HTTP look for              |

Notable:
- a line of the journal holds a batch's rows and the place after it, under a CRC-32: it counts as a whole or not at all,
  so after any kill the rows and the place agree, and nothing is lost or there twice;
- a shard is sealed in three steps: the shard is written, `progress` is replaced, the journal is emptied. A journal that
  was not emptied has the number of the seal before, and is not read.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tt_cli.atomic_write import atomic_write
from tt_cli.data.columns import Row
from tt_cli.data.shard_format import (
    TARGET_BYTES,
    ShardFacts,
    row_of_json,
    row_to_json,
    stored_bytes,
    write_shard,
    writing,
)
from tt_cli.errors import TTError, UsageError

SETTINGS = "encode.json"
SHARDS = "data"
PROGRESS = "progress"
SUMS = "SHA256SUMS"

Place = tuple[int, int]  # in a source: the number among this worker's units, and pictures of it that are done with


@dataclass
class ShareState:
    """The content of `progress/NNN.json`: what is sealed of one share."""

    place: Place = (0, 0)
    counts: Counter[str] = field(default_factory=Counter)
    shards: list[ShardFacts] = field(default_factory=list)
    broken_bytes: int = 0  # length of the list of broken pictures up to here
    seals: int = 0
    done: bool = False

    @classmethod
    def read(cls, out: Path, share: int) -> Self:
        """That of a share in an output folder, a new one where there is none. TTError for a file that is none."""
        path = out / PROGRESS / f"{share:03d}.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            unit, number = known["place"]
            shards = [ShardFacts(**facts) for facts in known["shards"]]
            return cls(**{**known, "place": (unit, number), "counts": Counter(known["counts"]), "shards": shards})
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TTError(f"cannot read {path} ({error}); start again with another output folder") from error

    def write(self, out: Path, share: int) -> None:
        """Have `read` find this."""
        content = json.dumps(vars(self), default=vars) + "\n"
        atomic_write(out / PROGRESS / f"{share:03d}.json", content)


def sums_of(shards: Iterable[ShardFacts]) -> str:
    """The content of SHA256SUMS, which `sha256sum -c` reads."""
    return "".join(f"{facts.sha256}  {SHARDS}/{facts.name}\n" for facts in shards)


def write_sums(out: Path, shares: int) -> None:
    """Write SHA256SUMS if every share is finished in this folder. Raises TTError."""
    states = [ShareState.read(out, share) for share in range(shares)]
    if all(state.done for state in states):
        with writing(out / SUMS):
            atomic_write(out / SUMS, sums_of(facts for state in states for facts in state.shards))


def agree_on(out: Path, settings: Mapping[str, Any]) -> None:
    """Have all that ever work on this folder work with equal settings: the first writes them down.

    Raises UsageError, naming what differs, TTError where the folder cannot be written.
    """
    path = out / SETTINGS
    try:
        with writing(f"to {out}"):
            for folder in (out, out / SHARDS, out / PROGRESS):
                folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                atomic_write(path, json.dumps(settings, indent=1) + "\n", replace=False)
            known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TTError(f"cannot read {path} ({error}); start again with another output folder") from error
    for key, value in settings.items():
        there = known.get(key) if isinstance(known, dict) else known
        if there != value:
            raise UsageError(
                f"{out} was begun with {key} {there!r}, not {value!r}; go on as it was begun, or name another folder"
            )


class Journal:
    """The rows of the shard that is being made, and what came before them. One process at a time.

    `finished` is what is sealed, `place` and `counts` include what is not. Raises TTError from all methods when the
    disk is full or fails; what is recorded stays, and a new Journal goes on from it.
    """

    def __init__(self, out: Path, worker: int, container: str, target: int = TARGET_BYTES, split: str = "train"):
        self._out, self._worker, self._container, self._target, self._split = out, worker, container, target, split
        self._path = out / PROGRESS / f"{worker:03d}.rows"
        self.rows: list[Row] = []
        self.broken: list[dict[str, str]] = []
        self._bytes = 0
        with writing(self._path):
            self._file = self._path.open("ab+", buffering=0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise UsageError(
                    f"another process encodes this part into {out} already; give each its own part with --shard"
                ) from None
            self.finished = ShareState.read(out, worker)
            self.place, self.counts = self.finished.place, Counter(self.finished.counts)
            self._recover()

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()

    def record(
        self, place: Place, rows: Sequence[Row], counts: Mapping[str, int], broken: Sequence[dict[str, str]]
    ) -> None:
        """A batch is done: its rows, what to add to the counts, and the place in the source after it."""
        json_rows = [row_to_json(row) for row in rows]
        batch = {"seal": self.finished.seals, "place": place, "rows": json_rows, "counts": counts, "broken": broken}
        text = json.dumps(batch, separators=(",", ":")).encode()
        rest = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
        with writing(self._path):
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())
        self._add(place, rows, counts, broken)

    @property
    def full(self) -> bool:
        """True if the rows are enough for a shard."""
        return self._bytes >= self._target

    def seal(self, *, done: bool = False) -> None:
        """Make a shard of the rows, if there are any. done: the source has no more for this worker."""
        before, shards = self.finished, list(self.finished.shards)
        broken_bytes = self._list_broken()
        if self.rows:
            name = f"{self._split}-{self._worker:03d}-{len(shards):05d}{self._container}"
            shards.append(write_shard(self._out / SHARDS / name, self.rows))
        now = ShareState(self.place, Counter(self.counts), shards, broken_bytes, before.seals + 1, done)
        with writing(self._path.with_suffix(".json")):
            now.write(self._out, self._worker)
            self.finished, self.rows, self.broken, self._bytes = now, [], [], 0
            os.ftruncate(self._file.fileno(), 0)

    def _recover(self) -> None:
        """Take up the lines that are whole; cut off what comes after them."""
        good = 0
        self._file.seek(0)
        for line in self._file.read().splitlines(keepends=True):
            crc, _, text = line.partition(b" ")
            if not text.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text[:-1]):
                break
            batch = json.loads(text)
            if batch["seal"] != self.finished.seals:
                break
            good += len(line)
            rows = [row_of_json(row) for row in batch["rows"]]
            self._add(tuple(batch["place"]), rows, batch["counts"], batch["broken"])
        os.ftruncate(self._file.fileno(), good)

    def _add(
        self, place: Place, rows: Sequence[Row], counts: Mapping[str, int], broken: Sequence[dict[str, str]]
    ) -> None:
        self.place = place
        self.rows += rows
        self.broken += broken
        self.counts.update(counts)
        self._bytes += sum(stored_bytes(row, self._container) for row in rows)

    def _list_broken(self) -> int:
        """Have the list of broken pictures end with those of this shard. Returns its length in bytes."""
        before = self.finished.broken_bytes
        if not self.broken:
            return before
        path = self._out / f"broken-{self._worker:03d}.jsonl"
        lines = (json.dumps(picture, ensure_ascii=False) + "\n" for picture in self.broken)
        with writing(path), path.open("ab") as file:
            file.truncate(before)
            file.write("".join(lines).encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

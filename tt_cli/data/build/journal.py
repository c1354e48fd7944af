"""Journal of the work of one process of `tt data encode`, on the disk so that it can be killed at any instant.

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

import dataclasses
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
    advice,
    row_of_json,
    row_to_json,
    stored_bytes,
    write_shard,
)
from tt_cli.errors import TTError, UsageError

SETTINGS = "encode.json"
SHARDS = "data"
PROGRESS = "progress"
SUMS = "SHA256SUMS"

Place = tuple[int, int]
"""A place in a source: the number among this worker's units, and how many pictures of it are done with."""


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
    def read(cls, path: Path) -> Self:
        """The state in a file, a new one where there is none. Raises TTError for what is no such file."""
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            unit, number = known.pop("place")
            shards = [ShardFacts(**facts) for facts in known.pop("shards")]
            return cls(place=(unit, number), counts=Counter(known.pop("counts")), shards=shards, **known)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TTError(f"cannot read {path} ({error}); start again with another output folder") from error

    def to_json(self) -> bytes:
        """The text that `read` takes."""
        shards = [dataclasses.asdict(facts) for facts in self.shards]
        return json.dumps({**vars(self), "counts": dict(self.counts), "shards": shards}).encode() + b"\n"


def sums_of(shards: Iterable[ShardFacts]) -> str:
    """The content of SHA256SUMS, which `sha256sum -c` reads."""
    return "".join(f"{facts.sha256}  {SHARDS}/{facts.name}\n" for facts in shards)


def write_sums(out: Path, shares: int) -> bool:
    """Write SHA256SUMS if every share is finished in this folder. Raises TTError."""
    states = [ShareState.read(out / PROGRESS / f"{share:03d}.json") for share in range(shares)]
    if not all(state.done for state in states):
        return False
    path = out / SUMS
    try:
        atomic_write(path, sums_of(facts for state in states for facts in state.shards))
    except OSError as error:
        raise TTError(f"cannot write {path}: {error.strerror or error}; {advice(error)}") from error
    return True


def agree_on(out: Path, settings: Mapping[str, Any]) -> None:
    """Have all that ever work on this folder work with equal settings: the first writes them down.

    Raises UsageError, naming what differs, TTError where the folder cannot be written.
    """
    path = out / SETTINGS
    try:
        for folder in (out, out / SHARDS, out / PROGRESS):
            folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            atomic_write(path, json.dumps(settings, indent=1) + "\n", replace=False)
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TTError(f"cannot read {path} ({error}); start again with another output folder") from error
    except OSError as error:
        raise TTError(f"cannot write to {out}: {error.strerror or error}; {advice(error)}") from error
    for key, value in settings.items():
        if not isinstance(known, dict) or known.get(key) != value:
            there = known.get(key) if isinstance(known, dict) else known
            raise UsageError(
                f"{out} was begun with {key} {there!r}, not {value!r}; go on as it was begun, or name another folder"
            )


class Journal:
    """The rows of the shard that is being made, and what came before them. One process at a time.

    `finished` is what is sealed, `place` and `counts` include what is not. Raises TTError from all methods when the
    disk is full or fails; what is recorded stays, and a new Journal goes on from it.
    """

    def __init__(self, out: Path, worker: int, container: str, target: int = TARGET_BYTES):
        self._out, self._worker, self._container, self._target = out, worker, container, target
        self._state_path = out / PROGRESS / f"{worker:03d}.json"
        self._path = out / PROGRESS / f"{worker:03d}.rows"
        self.rows: list[Row] = []
        self.broken: list[dict[str, str]] = []
        self._bytes = 0
        try:
            self._file = self._path.open("ab+", buffering=0)
            self._lock()
            self.finished = ShareState.read(self._state_path)
            self.place, self.counts = self.finished.place, Counter(self.finished.counts)
            self._recover()
        except OSError as error:
            raise self._cannot(self._path, error) from error

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()

    def record(
        self, place: Place, rows: Sequence[Row], counts: Mapping[str, int], broken: Sequence[dict[str, str]]
    ) -> None:
        """A batch is done: its rows, what to add to the counts, and the place in the source after it."""
        line = {
            "seal": self.finished.seals,
            "place": place,
            "rows": [row_to_json(row) for row in rows],
            "counts": counts,
            "broken": list(broken),
        }
        text = json.dumps(line, separators=(",", ":")).encode()
        try:
            _write_all(self._file.fileno(), b"%08x %s\n" % (zlib.crc32(text), text))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot(self._path, error) from error
        self._add(place, rows, counts, broken)

    @property
    def full(self) -> bool:
        """True if the rows are enough for a shard."""
        return self._bytes >= self._target

    def seal(self, *, done: bool = False) -> ShardFacts | None:
        """Make a shard of the rows, None if there are none. done: the source has no more for this worker."""
        before = self.finished
        facts = None
        broken_bytes = self._list_broken()
        if self.rows:
            name = f"train-{self._worker:03d}-{len(before.shards):05d}{self._container}"
            facts = write_shard(self._out / SHARDS / name, self.rows)
        now = ShareState(
            self.place,
            self.counts,
            [*before.shards, *([facts] if facts else [])],
            broken_bytes,
            before.seals + 1,
            done,
        )
        try:
            atomic_write(self._state_path, now.to_json())
            self.finished, self.rows, self.broken, self._bytes = now, [], [], 0
            self.counts = Counter(now.counts)
            os.ftruncate(self._file.fileno(), 0)
        except OSError as error:
            raise self._cannot(self._state_path, error) from error
        return facts

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another process encodes this part into {self._out} already; give each its own part with --shard"
            ) from None

    def _recover(self) -> None:
        """Take up the lines that are whole; cut off what comes after them."""
        good = 0
        with self._path.open("rb") as file:
            for line in file:
                known = _checked(line)
                if known is None or known["seal"] != self.finished.seals:
                    break
                good += len(line)
                rows = [row_of_json(row) for row in known["rows"]]
                self._add(tuple(known["place"]), rows, known["counts"], known["broken"])
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
        text = b"".join(json.dumps(picture, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for picture in self.broken)
        try:
            with path.open("ab") as file:
                file.truncate(before)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot(path, error) from error
        return before + len(text)

    @staticmethod
    def _cannot(path: Path, error: OSError) -> TTError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return TTError(f"cannot write {path}: {reason}; {advice(error)}")


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _checked(line: bytes) -> dict[str, Any] | None:
    """A line of the journal, None for one that is not whole."""
    crc, space, text = line.partition(b" ")
    if not (space and text.endswith(b"\n")) or crc != b"%08x" % zlib.crc32(text[:-1]):
        return None
    known: dict[str, Any] = json.loads(text)
    return known

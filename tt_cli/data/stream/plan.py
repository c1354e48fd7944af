"""The plan of a read: where a run's examples lie, which of them are good, and how many are shuffled together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tt_cli.data.row_rules import RowRules
from tt_cli.data.stream.transfer import PATIENCE
from tt_cli.run import DalleRun, RunConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of a process that reads: plain data.

    reader: MODULE:FUNCTION that takes the plan as JSON, and who hears a trouble and a remedy, and yields packed blocks.
    memory: bytes that the process takes at most; a page of parquet of a few kilobytes can stand for gigabytes.
    """

    reader: ClassVar[str]
    memory: ClassVar[int]
    state: dict[str, Any] | None = None  # where an earlier reader was


@dataclass(frozen=True)
class ReadPlan(Plan):
    """The work of a process that reads captions and codes."""

    reader: ClassVar[str] = "tt_cli.data.stream.row_reader:packed_blocks"
    memory: ClassVar[int] = 1 << 30
    kind: str  # this and the next two: see `location_of`
    place: str
    revision: str | None
    split: str
    seed: int
    shuffle_buffer: int  # rows that are shuffled together
    rules: RowRules
    cache: Path | None = None  # a folder for shards, None to keep none
    cache_bytes: int = 0
    patience: float = PATIENCE  # seconds that a transfer may stand still
    strict: bool = False  # a shard that does not come is an error


def plan_of(
    run: RunConfig,
    split: str,
    seed: int,
    *,
    cache: Path | None = None,
    state: dict[str, Any] | None = None,
    strict: bool = False,
) -> ReadPlan:
    """The plan of a run file."""
    data = DalleRun.of(run).data
    kind, place = data.source, data.name
    if data.location is not None:
        kind, place = "files", data.location
    elif place.startswith(("/", "./", "../", "~")) or Path(place).is_dir():
        kind = "files"
    rules, cache_bytes = RowRules.of(run), data.cache_mb * 10**6
    plan = ReadPlan(kind, place, data.revision, split, seed, data.shuffle_buffer, rules)
    return replace(plan, cache=cache, cache_bytes=cache_bytes, state=state, strict=strict)


def session_seed(seed: int, peer: str) -> int:
    """A seed for the order of one peer's shards: peers that were given the same one are not in step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {peer}".encode()).digest()[:8]) if peer else seed

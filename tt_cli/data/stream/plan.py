"""What a run file says about its examples, as a plan for whoever reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tt_cli.data.examples import RowRules
from tt_cli.data.stream.row_reader import ReadPlan
from tt_cli.run import RunConfig


def plan_of(
    run: RunConfig,
    split: str,
    seed: int,
    *,
    cache: Path | None = None,
    state: dict[str, Any] | None = None,
    strict: bool = False,
) -> ReadPlan:
    """Where a run's examples lie, which of them are good, and how many are shuffled together. cache: a folder."""
    data = run.data
    kind, place = data.source, data.name
    if data.location is not None:
        kind, place = "files", data.location
    elif place.startswith(("/", "./", "../", "~")) or Path(place).is_dir():
        kind = "files"
    return ReadPlan(
        kind=kind,
        place=place,
        revision=data.revision,
        split=split,
        seed=seed,
        shuffle_buffer=data.shuffle_buffer,
        rules=RowRules.of(run),
        cache=None if cache is None else str(cache),
        cache_bytes=data.cache_mb * 10**6,
        state=state,
        strict=strict,
    )


def session_seed(seed: int, peer: str) -> int:
    """Of the order of one peer's shards: peers that were given the same seed are not in step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {peer}".encode()).digest()[:8]) if peer else seed

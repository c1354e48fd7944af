"""Shards as files to read, from their place or from this peer's disk, and the next one already on its way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from tt_cli.atomic_write import atomic_write
from tt_cli.data.stream.shard_cache import ShardCache
from tt_cli.data.stream.shard_locations import Folder, Shard, location_of
from tt_cli.data.stream.transfer import ShardProblem


class Supply:
    """The shards of one split of a data set. cache: a folder, or None; note: hears what a person may want to know.

    may_look_ahead: whether `look_ahead` fetches. problem: why the last `find` failed.
    """

    def __init__(
        self,
        kind: str,
        place: str,
        revision: str | None,
        patience: float,
        cache: str | None,
        cache_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        self._location = location_of(kind, place, revision, patience)
        self._asked, self._note = f"{kind} {place} {revision}", note
        self._folder = None if cache is None or self.local else Path(cache)
        self._cache = ShardCache(self._folder or Path(os.devnull), cache_bytes if self._folder else 0, note)
        self._pinned = kind == "hub" and bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._ahead: dict[int, Future[BinaryIO]] = {}
        self.shards: list[Shard] = []
        self.may_look_ahead = False
        self.problem = ShardProblem("")

    def find(self, split: str) -> bool:
        """Fill `shards`; False where nobody answered and no earlier list is here. Raises UsageError."""
        known = self._recalled(split)
        if known and self._pinned:
            self.shards = known
            return True
        try:
            self.shards = self._location.shards(split)
        except ShardProblem as problem:
            self.problem = problem
            if not known:
                return False
            self._note(f"cannot list the shards ({problem}); the list of the last time serves")
            self.shards = known
            return True
        self._remember(split)
        return True

    @property
    def local(self) -> bool:
        """Whether the shards lie on this machine; then none is fetched or kept."""
        return isinstance(self._location, Folder)

    def take(self, number: int) -> BinaryIO:
        """A shard at its beginning; close it. Raises ShardProblem."""
        ahead = self._ahead.pop(number, None)
        if ahead is not None:
            return ahead.result()
        return self._brought(number)

    def look_ahead(self, numbers: list[int]) -> None:
        """Have these shards fetched meanwhile."""
        if not self.may_look_ahead or self.local:
            return
        for number in numbers:
            if number not in self._ahead:
                self._ahead[number] = self._fetcher.submit(self._brought, number)

    def forget(self, number: int) -> None:
        """A shard is of no use: it is to be fetched anew the next time."""
        if self._folder is not None:
            self._cache.remove(self._content(self.shards[number]))

    def close(self) -> None:
        """Fetch nothing more."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)

    def _brought(self, number: int) -> BinaryIO:
        shard, location = self.shards[number], self._location
        if isinstance(location, Folder):
            return location.open(shard)
        return self._cache.bring(
            self._content(shard), lambda target, announced: location.fetch(shard, target, announced)
        )

    def _content(self, shard: Shard) -> str:
        return f"{self._location.key}\n{shard.name}\n{shard.sha256 or shard.bytes or ''}"

    # ------------------------------------------------------------ the list of the last time

    def _list_path(self, split: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"list-{hashlib.sha256(f'{self._asked} {split}'.encode()).hexdigest()[:16]}.json"

    def _remember(self, split: str) -> None:
        path = self._list_path(split)
        if path is None:
            return
        known = [[shard.name, shard.bytes, shard.sha256] for shard in self.shards]
        with contextlib.suppress(OSError):  # it is fetched again the next time
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(path, json.dumps({"found": self._location.found, "shards": known}), durable=False)

    def _recalled(self, split: str) -> list[Shard]:
        path = self._list_path(split)
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path else {}
            shards = [Shard(str(name), size, digest) for name, size, digest in known["shards"]]
            self._location.found = str(known["found"])
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return shards

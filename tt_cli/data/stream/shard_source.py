"""Shards as files to read, from their place or from this peer's disk, and the next one already on its way."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO

from tt_cli.atomic_write import atomic_write
from tt_cli.data.stream.plan import ReadPlan
from tt_cli.data.stream.shard_cache import ShardCache
from tt_cli.data.stream.shard_locations import Folder, Shard, location_of
from tt_cli.data.stream.transfer import ShardProblem, fetch


class ShardSource:
    """The shards of one split of a data set, by a plan. note: hears what a person may want to know."""

    def __init__(self, plan: ReadPlan, note: Callable[[str], None]) -> None:
        self._plan, self._note = plan, note
        self._location = location_of(plan.kind, plan.place, plan.revision, plan.patience)
        self._folder = None if self.local else plan.cache
        self._cache = ShardCache(self._folder or Path(os.devnull), plan.cache_bytes if self._folder else 0, note)
        names = f"{plan.kind} {plan.place} {plan.revision} {plan.split}"
        self._list_name = f"list-{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._ahead: dict[int, Future[BinaryIO]] = {}
        self.shards: list[Shard] = []
        self.may_look_ahead = False  # or `look_ahead` does nothing

    def find(self) -> None:
        """Fill `shards`. Raises ShardProblem where nobody answered and no earlier list is here, UsageError."""
        pinned = self._plan.kind == "hub" and re.fullmatch(r"[0-9a-f]{40}", self._plan.revision or "")
        self.shards = self._recalled()
        if self.shards and pinned:
            return
        try:
            self.shards = self._location.shards(self._plan.split)
        except ShardProblem as problem:
            if not self.shards:
                raise
            self._note(f"cannot list the shards ({problem}); the list of the last time serves")
        else:
            self._remember()

    @property
    def local(self) -> bool:
        """True if the shards lie on this machine; then none is fetched or kept."""
        return isinstance(self._location, Folder)

    def take(self, number: int) -> BinaryIO:
        """A shard at its beginning; close it. Raises ShardProblem."""
        ahead = self._ahead.pop(number, None)
        return ahead.result() if ahead else self._brought(number)

    def look_ahead(self, number: int | None) -> None:
        """Have this shard fetched meanwhile."""
        if number is not None and number not in self._ahead and self.may_look_ahead and not self.local:
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
        return self._cache.bring(self._content(shard), functools.partial(fetch, location.request(shard)))

    def _content(self, shard: Shard) -> str:
        return f"{self._location.key}\n{shard.name}\n{shard.sha256 or shard.bytes or ''}"

    # ------------------------------------------------------------ the list of the last time

    def _remember(self) -> None:
        if self._folder is None:
            return
        content = {"resolved": self._location.resolved, "shards": [astuple(shard) for shard in self.shards]}
        with suppress(OSError):  # it is fetched again the next time
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._folder / self._list_name, json.dumps(content), durable=False)

    def _recalled(self) -> list[Shard]:
        if self._folder is None:
            return []
        try:
            known = json.loads((self._folder / self._list_name).read_text(encoding="utf-8"))
            self._location.resolved, shards = str(known["resolved"]), known["shards"]
            return [Shard(str(name), size, digest) for name, size, digest in shards]
        except (OSError, ValueError, KeyError, TypeError):
            return []

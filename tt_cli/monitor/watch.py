"""Observation of the swarm beside the screen, in threads of its own: a slow answer never keeps a key waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tt_cli.errors import TTError
from tt_cli.monitor.changes import changes, first_words
from tt_cli.monitor.page_client import Page, Past
from tt_cli.monitor.scene import EVER, Active, Scene, leaders_now
from tt_cli.supervisor.slot import look_at, slots_in
from tt_cli.swarm.records.snapshot import SwarmSnapshot
from tt_cli.terminal.format import clean, duration, plural

PAST_SECONDS = 10.0  # between two questions for the past
HERE_SECONDS = 2.0
LOG_LINES = 1000
REMEMBERED = 5000  # looks, for the curve of the swarm's size


class SwarmWatch:
    """A context manager. scene: what is known now. news: counts what was learned, so that a screen knows when to draw.

    look: one snapshot; it may take long and may raise. interval: seconds between two. source: where it looks, in words.
    page: where the past comes from, None for the DHT's short history. folder: of this machine's peers of the run.
    flops: floating-point operations of one sample.
    """

    def __init__(
        self,
        run: str,
        identity: str,
        look: Callable[[], SwarmSnapshot],
        *,
        interval: float,
        source: str,
        page: Page | None,
        folder: Path,
        flops: int,
    ) -> None:
        self._look, self._interval, self._page, self._folder = look, interval, page, folder
        self.news = 0
        self._lock, self._end = threading.RLock(), threading.Event()
        began = time.time()
        self._scene = Scene(run, identity, now=began, asked_since=began, source=source, flops_per_sample=flops)
        self._past = Past({}, [], {})
        self._losses: dict[int, float] = {}
        self._active: deque[Active] = deque(maxlen=REMEMBERED)
        self._log: deque[tuple[float, str]] = deque(maxlen=LOG_LINES)

    def __enter__(self) -> SwarmWatch:
        self._begin(self.look, self._interval)
        self._begin(self.look_here, HERE_SECONDS)
        if self._page is not None:
            self._begin(self.look_back, PAST_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # the threads end with the process: one may wait for an answer still

    def _begin(self, step: Callable[[], None], seconds: float) -> None:
        def repeat() -> None:
            while not self._end.is_set():
                step()
                self._end.wait(seconds)

        threading.Thread(target=repeat, daemon=True).start()

    def scene(self) -> Scene:
        """Everything known at this moment."""
        with self._lock:
            snapshot, past = self._scene.snapshot, self._past
            recorded = {step: loss for step, loss, _ in snapshot.history} if snapshot else {}
            newest = past.activity[-1].time if past.activity else 0.0
            now_only = {EVER: leaders_now(snapshot)} if snapshot and EVER not in past.leaders else {}
            return replace(
                self._scene,
                now=time.time(),
                curve=sorted((self._losses | recorded | past.losses).items()),
                activity=sorted(past.activity + [seen for seen in self._active if seen.time > newest]),
                leaders={**now_only, **past.leaders},
                log=list(self._log),
            )

    def _learn(self, **changes: Any) -> None:
        with self._lock:
            self._scene = replace(self._scene, **changes)
            self.news += 1

    def look(self) -> None:
        """Take one look and remember what it shows. What a look raises is told on the screen."""
        try:
            snapshot = self._look()
        except Exception as error:  # whatever a dying DHT node makes hivemind raise; the next look may do
            self._learn(trouble=_reason(error))
            return
        with self._lock:
            self._take(snapshot)

    def _take(self, snapshot: SwarmSnapshot) -> None:
        before, was_empty = self._scene.snapshot, self._scene.empty
        if before is not None and not before.peers:
            before = None
        if not snapshot.peers:
            if before is not None and not was_empty:
                self._log.append((snapshot.time, "no peer answers any more"))
            self._learn(trouble="", empty=True, snapshot=before or snapshot)  # the last swarm seen is better than none
            return
        if before is None:
            self._log.append((snapshot.time, first_words(snapshot)))
        else:
            if was_empty:
                away = duration(snapshot.time - before.time)
                self._log.append((snapshot.time, f"{plural(len(snapshot.peers), 'peer')} answer again after {away}"))
            self._log.extend((snapshot.time, line) for line in changes(before, snapshot))
        # Where the run was taken back, later steps are no part of it any more.
        self._losses = {step: loss for step, loss in self._losses.items() if step <= snapshot.epoch}
        if snapshot.loss is not None and snapshot.epoch:
            self._losses[snapshot.epoch] = snapshot.loss
        self._active.append(Active(snapshot.time, snapshot.trainers, snapshot.samples_per_second))
        self._learn(trouble="", empty=False, snapshot=snapshot)

    def look_back(self) -> None:
        """Ask the page for the past."""
        assert self._page is not None
        first = not self._scene.past_from
        try:
            past = self._page.past()
            rounds = self._page.rounds() if first else []
        except TTError as error:
            self._learn(past_trouble=str(error))
            return
        with self._lock:
            self._past = past
            recorded = [(at, clean(line)) for at, line in rounds if at < self._scene.asked_since]
            self._log = deque([*recorded, *self._log], maxlen=LOG_LINES)
            self._learn(past_from=self._page.url, past_trouble="")

    def look_here(self) -> None:
        """Ask the peers of this run on this machine."""
        try:
            slots = [slot for slot in slots_in(self._folder.parent.parent) if slot.folder == self._folder]
            mine = [seen for seen in map(look_at, slots) if seen is not None]
        except OSError:  # the folder is not readable: nothing is known of peers here
            mine = []
        self._learn(mine=sorted(mine, key=lambda seen: (not seen.running, seen.slot.name)))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return clean(text if isinstance(error, TTError) and text else f"{type(error).__name__}: {text}".rstrip(": "))

"""Observation of the swarm beside the screen, in threads of its own: a slow answer never keeps a key waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tt_cli.errors import TTError
from tt_cli.monitor.changes import changes, first_words
from tt_cli.monitor.page_client import Page, Past
from tt_cli.monitor.scene import EVER, Active, Scene, leaders_now
from tt_cli.supervisor.slot import SeenSlot, look_at, slots_in
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
    flops: floating-point operations of one sample, asked for once, in a thread.
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
        flops: Callable[[], int],
    ) -> None:
        self._run, self._identity, self._look, self._interval = run, identity, look, interval
        self._source, self._page, self._folder, self._ask_flops = source, page, folder, flops
        self.news = 0
        self._lock, self._end = threading.Lock(), threading.Event()
        self._since = time.time()
        self._snapshot: SwarmSnapshot | None = None
        self._trouble, self._empty, self._past_trouble = "", True, ""
        self._losses: dict[int, float] = {}
        self._active: deque[Active] = deque(maxlen=REMEMBERED)
        self._log: deque[tuple[float, str]] = deque(maxlen=LOG_LINES)
        self._past: Past | None = None
        self._mine: list[SeenSlot] = []
        self._flops: int | None = None

    def __enter__(self) -> SwarmWatch:
        self._begin(self.look, self._interval)
        self._begin(self.look_here, HERE_SECONDS)
        if self._page is not None:
            self._begin(self.look_back, PAST_SECONDS)
        threading.Thread(target=self._learn_flops, daemon=True).start()
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
            snapshot, past = self._snapshot, self._past
            losses = dict(self._losses)
            if snapshot is not None:
                losses.update((step, loss) for step, loss, _ in snapshot.history)
            losses.update(past.losses if past else {})
            activity = list(past.activity) if past else []
            newest = activity[-1].time if activity else 0.0
            leaders = dict(past.leaders) if past else {}
            if snapshot is not None and EVER not in leaders:
                leaders[EVER] = leaders_now(snapshot)
            return Scene(
                run=self._run,
                identity=self._identity,
                now=time.time(),
                asked_since=self._since,
                answered=None if snapshot is None or not snapshot.peers else snapshot.time,
                empty=self._empty,
                trouble=self._trouble,
                source=self._source,
                past_from="" if past is None or self._page is None else self._page.url,
                past_trouble=self._past_trouble,
                snapshot=snapshot,
                curve=sorted(losses.items()),
                activity=activity + [seen for seen in self._active if seen.time > newest],
                leaders=leaders,
                mine=self._mine,
                log=list(self._log),
                flops_per_sample=self._flops,
            )

    def look(self) -> None:
        """Take one look and remember what it shows. What a look raises is told on the screen."""
        try:
            snapshot = self._look()
        except Exception as error:  # whatever a dying DHT node makes hivemind raise; the next look may do
            with self._lock:
                self._trouble = _words(error)
                self.news += 1
            return
        with self._lock:
            self._trouble = ""
            self._take(snapshot)
            self.news += 1

    def _take(self, snapshot: SwarmSnapshot) -> None:
        before, was_empty = self._snapshot, self._empty
        self._empty = not snapshot.peers
        if self._empty:
            if before is not None and before.peers and not was_empty:
                self._log.append((snapshot.time, "no peer answers any more"))
            if before is None or not before.peers:  # the last swarm seen is better than none
                self._snapshot = snapshot
            return
        if before is None or not before.peers:
            self._log.append((snapshot.time, first_words(snapshot)))
        else:
            if was_empty:
                away = duration(snapshot.time - before.time)
                self._log.append((snapshot.time, f"{plural(len(snapshot.peers), 'peer')} answer again after {away}"))
            self._log.extend((snapshot.time, words) for words in changes(before, snapshot))
        self._snapshot = snapshot
        # Where the run was taken back, later steps are no part of it any more.
        self._losses = {step: loss for step, loss in self._losses.items() if step <= snapshot.epoch}
        if snapshot.loss is not None and snapshot.epoch:
            self._losses[snapshot.epoch] = snapshot.loss
        self._active.append(Active(snapshot.time, snapshot.trainers, snapshot.samples_per_second))

    def look_back(self) -> None:
        """Ask the page for the past."""
        assert self._page is not None
        try:
            first = self._past is None
            past = self._page.past()
            rounds = self._page.rounds() if first else []
        except TTError as error:
            with self._lock:
                self._past_trouble = str(error)
            return
        with self._lock:
            self._past, self._past_trouble = past, ""
            if first:
                recorded = [(at, clean(words)) for at, words in rounds if at < self._since]
                self._log = deque([*recorded, *self._log], maxlen=LOG_LINES)
            self.news += 1

    def look_here(self) -> None:
        """Ask the peers of this run on this machine."""
        try:
            slots = [slot for slot in slots_in(self._folder.parent.parent) if slot.folder == self._folder]
            mine = [seen for seen in map(look_at, slots) if seen is not None]
        except OSError:  # the folder is not readable: nothing is known of peers here
            mine = []
        with self._lock:
            self._mine = sorted(mine, key=lambda seen: (not seen.running, seen.slot.name))
            self.news += 1

    def _learn_flops(self) -> None:
        flops = self._ask_flops()
        with self._lock:
            self._flops = flops
            self.news += 1


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return clean(text if isinstance(error, TTError) and text else f"{type(error).__name__}: {text}".rstrip(": "))

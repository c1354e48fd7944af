"""Recorder of what the swarm did: every step, who gave what for it, how many train. Others read it from the database.

Notable:
- a thread of its own writes; a database that is locked, full or out of reach never stops the coordinator: what is due
  stays in memory, within bounds, and is written when it is back;
- the history for the DHT is in memory, read once at the start;
- of the peers' records only the newest is kept until it is written, for their totals only grow;
- while nobody votes one record is believed, and may lie: steps beyond those that voters agree on do not count any more
  when they have agreed, look by look, for as long as those steps took, and for SETTLED_SECONDS at least; they count
  again when a later one follows on them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from tt_cli.database import DatabaseDamaged, DatabaseDown
from tt_cli.errors import TTError
from tt_cli.history.writer import HistoryWriter, MadeStep
from tt_cli.run import RunConfig
from tt_cli.swarm.records.consensus import FAR_AHEAD, SwarmState, voters_among
from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord

HISTORY_STEPS = 256
ACTIVITY_SECONDS = 30.0
TIDY_SECONDS = 3600.0
AGAIN_SECONDS = 5.0
SETTLED_SECONDS = 300.0
LOOK_SECONDS = 5.0  # for which one look stands at most
MOST_DUE = 20_000  # writes that wait for the database
ORDER_SECONDS = 12.0  # for an organiser's order to be written: as long as SQLite waits for a lock, and a moment
CLOSE_SECONDS = 5.0

Kind = Literal["step", "activity", "other"]  # the first two write down the peers
Write = Callable[[HistoryWriter, list[PeerRecord], int], None]
"""Takes the peers seen since the last write, and the steps made since then."""


class RunRecorder:
    """Records one run into the database at this URL. tell: takes a line and "info", "warning" or "error".

    clock: Unix time.
    Raises OtherDatabase, for a database that is not this run's. All methods but `put` are for one thread.
    """

    def __init__(
        self, run: RunConfig, url: str, tell: Callable[[str, str], None], clock: Callable[[], float] = time.time
    ):
        self._run, self._url, self._tell, self._clock = run, url, tell, clock
        self._lock = threading.Lock()
        self._due: deque[tuple[Kind, Write]] = deque(maxlen=MOST_DUE)
        self._order: tuple[int, threading.Event] | None = None  # that is to be written, and whether it has been
        self._era = 0  # of the last order: a view of before it shows steps that do not count any more
        self._latest: dict[str, tuple[str, float]] = {}  # key of Store.put → value, time
        self._seen: dict[tuple[str, str], PeerRecord] = {}
        self._steps: list[tuple[int, float, float]] = []
        self._doubted: list[tuple[int, float, float]] = []
        self._behind, self._looked_at = 0.0, self._clock()  # for how long voters agreed on earlier steps
        self._news, self._leaving = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None  # made later: a process that is forked here must not inherit it
        self._down = ""
        self._lost = 0
        self._recorded_at = self._tidied_at = -float("inf")
        self._store: HistoryWriter | None = None
        try:
            self._open().close()  # a process that is forked here inherits no connection; the next use makes another
        except DatabaseDown as error:
            self._fail(error)

    @property
    def step(self) -> int:
        """The last step recorded, 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    # ---------------------------------------------------------------- what is seen

    def record(self, view: SwarmState) -> bool:
        """Record one look at the swarm. True when it shows a new step whose loss is known."""
        now, trainers = self._clock(), [record for record in view.records if record.role == "trainer"]
        with self._lock:
            self._seen |= {(record.peer_id, record.user): record for record in view.records}
        at_step = [r for r in trainers if r.epoch == view.epoch and r.loss is not None and r.era >= self._era]
        speed, target = view.samples_per_second(), self._run.swarm.target_batch_size
        self._doubt(view, now)
        new = view.epoch > self.step and bool(at_step)
        if new:
            weights = [max(record.samples_per_second, 1e-9) for record in at_step]
            loss = sum(w * (r.loss or 0.0) for w, r in zip(weights, at_step, strict=True)) / sum(weights)
            made = MadeStep(view.epoch, at_step[0].era, now, loss, len(at_step), speed, _round_of(at_step))
            with self._lock:
                self._steps += [row for row in self._doubted if self.step < row[0] < view.epoch]
                self._steps.append((view.epoch, loss, now))
            self._write("step", lambda store, seen, steps: store.record_step(made, seen, target * steps))
        if not 0.0 <= now - self._recorded_at < ACTIVITY_SECONDS:  # also when the clock was set back
            self._recorded_at = now
            row = now, max(self.step, view.epoch) + 1, sum(not record.left for record in trainers), speed
            self._write("activity", lambda store, seen, steps: store.record_activity(*row, seen, target * steps))
        if not 0.0 <= now - self._tidied_at < TIDY_SECONDS:
            self._tidied_at = now
            self._write("other", lambda store, seen, steps: store.tidy(now))
        return new

    def _doubt(self, view: SwarmState, now: float) -> None:
        """Have steps beyond the voters' count no more when that is due."""
        passed, self._looked_at = max(0.0, min(now - self._looked_at, LOOK_SECONDS)), now
        if view.epoch >= self.step:
            self._behind = 0.0
        elif view.epoch + FAR_AHEAD < self.step and view.digest and voters_among(view.records, view.absent):
            self._behind += passed
            beyond = [row for row in self._steps if row[0] > view.epoch]
            if self._behind > max(SETTLED_SECONDS, beyond[-1][2] - beyond[0][2]):
                self._tell(f"voters are at step {view.epoch}: later steps that were recorded do not count", "warning")
                with self._lock:
                    self._doubted = beyond + [row for row in self._doubted if row[0] > self.step]
                    self._steps = self._steps[: -len(beyond)]
                self._write("other", lambda store, seen, steps: store.doubt(view.epoch))

    def put(self, key: str, content: Any) -> None:
        """The newest of something that changes, as JSON: see Store.put."""
        with self._lock:
            self._latest[key] = json.dumps(content, separators=(",", ":"), allow_nan=False), time.time()
        self._wake()

    def go_back(self, step: int, order: int) -> None:
        """Take what came after this step out of the run. Raises TTError when it is not written in time."""
        if self._order is None or self._order[0] != order:
            written = threading.Event()
            self._order, self._era = (order, written), order

            def back(store: HistoryWriter, seen: list[PeerRecord], steps: int) -> None:
                store.go_back(step, order)
                written.set()

            self._write("other", back)
        if not self._order[1].wait(0.0 if self._down else ORDER_SECONDS):
            raise TTError(f"cannot record an order: {self._down or 'the database of the history is busy'}")
        self._order = None  # the same may come again, after a process that ended in between
        with self._lock:
            self._steps, self._doubted = [known for known in self._steps if known[0] <= step], []

    def history(self) -> HistoryRecord:
        """The recorded steps, thinned evenly to at most 256; the last one is always among them."""
        steps = self._steps
        if len(steps) > HISTORY_STEPS:
            scale = (len(steps) - 1) / (HISTORY_STEPS - 1)
            steps = [steps[round(index * scale)] for index in range(HISTORY_STEPS)]
        return HistoryRecord(steps=steps)

    def close(self) -> None:
        """Write what is due, for some seconds."""
        self._leaving.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._store is not None:
            self._store.close()

    # ---------------------------------------------------------------- writing, in a thread

    def _write(self, kind: Kind, write: Write) -> None:
        with self._lock:
            self._lost += len(self._due) == MOST_DUE
            self._due.append((kind, write))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep_writing, name="recorder", daemon=True)
                self._thread.start()
        self._news.set()

    def _keep_writing(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            try:
                self._write_all(self._store or self._open())
                if self._down:
                    lost = f"; {self._lost} steps and counts had to be dropped" if self._lost else ""
                    self._tell(f"the history is written again{lost}", "info")
                    self._down, self._lost = "", 0
            except DatabaseDamaged as error:
                self._fail(error)
                if self._store is not None:
                    self._store.close()
                    self._store = None  # to be opened anew, which sets it aside
                self._news.set()
                self._leaving.wait(1.0)
            except TTError as error:
                self._fail(error)
                self._news.set()
                if self._leaving.wait(AGAIN_SECONDS):
                    return
            if self._leaving.is_set() and not self._news.is_set():
                return

    def _write_all(self, store: HistoryWriter) -> None:
        while True:
            with self._lock:
                latest, due = dict(self._latest), self._due[0] if self._due else None
                steps = max(1, sum(kind == "step" for kind, _ in self._due))
                seen = dict(self._seen)
            for key, (value, at) in latest.items():
                store.put(key, value, at)
                with self._lock:
                    if self._latest.get(key) == (value, at):
                        del self._latest[key]
            if due is None:
                return
            due[1](store, list(seen.values()), steps)
            with self._lock:
                if self._due and self._due[0] is due:
                    self._due.popleft()
                if due[0] != "other":
                    self._seen = {peer: record for peer, record in self._seen.items() if seen.get(peer) is not record}

    def _open(self) -> HistoryWriter:
        """The database, with what it knows. Raises DatabaseDown, OtherDatabase."""
        store = HistoryWriter(self._url, self._run.identity, lambda words: self._tell(words, "warning"))
        try:
            known = store.losses()
        except TTError:
            store.close()
            raise
        with self._lock:  # those in memory came while it could not be read
            first = self._steps[0][0] if self._steps else float("inf")
            self._steps = [row for row in known if row[0] < first] + self._steps
        self._store = store
        return store

    def _fail(self, error: TTError) -> None:
        """Tell what keeps it from writing, once."""
        if not self._down:
            self._tell(f"{error}; the run goes on, and what is to be recorded waits in memory", "error")
        self._down = str(error)


def _round_of(at_step: list[PeerRecord]) -> str:
    """Words about the round, of the fastest peer that has any."""
    teller = max(
        filter(lambda record: record.round, at_step), key=lambda record: record.samples_per_second, default=None
    )
    return f"{teller.user or teller.peer_id[-6:]}: {teller.round}" if teller else ""

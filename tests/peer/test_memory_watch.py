"""When a peer gives way because the host's memory runs short, and when it does not. Memory and time are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tt_cli.data.examples import Batch
from tt_cli.errors import TTError
from tt_cli.peer.device import Device
from tt_cli.peer.health.memory_watch import CLOSE, NOTHING, OVER, MemoryWatch, judge
from tt_cli.peer.micro_batch import MicroBatches
from tt_cli.supervisor.events import Event, Log
from tt_cli.supervisor.host_memory import HostMemory
from tt_cli.supervisor.reporter import WorkerBroken

GIB = 2**30


class Step:
    """A micro-batch that costs nothing."""

    device = Device(torch.device("cpu"), "a CPU", None)

    def __call__(self, batch: Batch) -> None: ...

    def release(self) -> None: ...

    def changed(self, size: int) -> None: ...


class Home:
    """A machine with `free` bytes, on which the peer takes `family`; a clock."""

    def __init__(self, folder: Path, memory: int | None = None, lower: bool = True, size: int = 8):
        self.free, self.total, self.family, self.now = 8 * GIB, 16 * GIB, GIB, 1e9
        self.expected = GIB
        self.events: list[Event] = []
        self.folder, self.memory, self.lower = folder, memory, lower
        self.batches = MicroBatches(Step(), size, self.events.append, clock=lambda: self.now)
        self.watch = self.begin()

    def begin(self) -> MemoryWatch:
        return MemoryWatch(
            self.memory,
            self.expected,
            self.folder / "restarted",
            self.events.append,
            lower=self.lower,
            family=lambda: self.family,
            host=lambda: HostMemory(self.free, self.total, "this machine"),
            clock=lambda: self.now,
        )

    def after(self, family: float, free: float = 8.0, held: str = "") -> None:
        """Another look, with so many GiB taken and free."""
        self.family, self.free = int(family * GIB), int(free * GIB)
        self.watch.look()
        self.watch.relieve(self.batches, held)

    @property
    def logs(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Log)]


@pytest.mark.parametrize(
    ("family", "free", "memory", "pressure"),
    [
        (4.0, 8.0, None, NOTHING),
        (4.0, 0.5, None, CLOSE),
        (4.0, 0.3, None, OVER),
        (4.0, 8.0, 8.0, NOTHING),
        (7.7, 8.0, 8.0, CLOSE),
        (8.1, 8.0, 8.0, OVER),
        (7.7, 0.2, 8.0, OVER),
    ],
)
def test_what_is_near_and_what_is_too_much(family: float, free: float, memory: float | None, pressure: int) -> None:
    host = HostMemory(int(free * GIB), 16 * GIB, "this container")
    look = judge(lambda: int(family * GIB), host, None if memory is None else int(memory * GIB))
    assert look.pressure == pressure
    assert bool(look.words) == bool(pressure)


def test_all_is_well(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB)
    home.after(1.5)
    assert home.batches.now == 8 and not home.events


def test_near_the_limit_fewer_examples_are_computed_at_a_time(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB)
    home.after(1.95)
    assert home.batches.now == 4
    assert "nearly all of the 2.0 GiB of --memory; the data stream holds little ahead" in home.logs[0]
    assert home.logs[0].endswith("going on with 4 examples at a time")
    home.after(1.5)
    assert home.batches.now == 4
    home.family = int(1.95 * GIB)
    home.watch.look()
    home.family = int(1.5 * GIB)  # with fewer at a time
    for _ in range(2):
        home.watch.relieve(home.batches)
    assert home.batches.now == 2, "once for a look"


def test_a_peer_that_is_held_computes_as_many_at_a_time_afterwards(tmp_path: Path) -> None:
    """Who uses the machine meanwhile may need nearly all of its memory."""
    home = Home(tmp_path)
    for free in (0.3, 0.3, 0.3, 8.0):
        home.after(1.0, free, held="somebody uses this machine")
    assert home.batches.now == 8 and not home.events
    with pytest.raises(WorkerBroken):  # itself it has grown, for which only a new process helps
        home.after(7.0, 0.3, held="somebody uses this machine")


def test_on_a_gpu_the_micro_batch_takes_none_of_the_hosts_memory(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB, lower=False)
    for _ in range(3):
        home.after(1.95)
    assert home.batches.now == 8
    assert [log.endswith("there is nothing that this peer could lower") for log in home.logs] == [True]


def test_over_the_limit_it_begins_anew_from_a_backup(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB, size=1)
    with pytest.raises(
        WorkerBroken, match="^this peer's processes take 2.1 GiB, more than the 2.0 GiB of --memory: beg"
    ):
        home.after(2.1)


def test_it_does_not_begin_anew_again_and_again(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB, size=1)
    with pytest.raises(WorkerBroken):
        home.after(2.1)
    home.family, home.now = GIB, home.now + 600
    home.watch = home.begin()
    with pytest.raises(TTError, match="beginning anew would not change that: give --memory 2.7GB") as caught:
        home.after(2.1)
    assert not isinstance(caught.value, WorkerBroken)
    home.family, home.now = GIB, home.now + 3600
    home.watch = home.begin()
    with pytest.raises(WorkerBroken):
        home.after(2.1)


def test_what_a_new_process_would_take_too_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    home = Home(tmp_path, memory=2 * GIB, size=1)
    home.expected = 2 * GIB
    home.watch = home.begin()
    with pytest.raises(TTError, match="beginning anew would not change that"):
        home.after(2.1)


def test_other_programs_memory_is_told_once_an_hour_and_ends_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path, size=1)
    for _ in range(5):
        home.after(1.05, free=0.1)
    home.now += 3601
    home.after(1.05, free=0.1)
    assert len(home.logs) == 2
    assert home.logs[0].startswith(
        "only 102 MiB of 16.0 GiB are left on this machine, this peer's processes take 1.0 GiB"
    )
    assert "close other programs" in home.logs[0]


def test_a_peer_that_grew_gives_way_where_the_machine_runs_short(tmp_path: Path) -> None:
    home = Home(tmp_path, size=2)
    home.after(5.0, free=0.1)
    assert home.batches.now == 1
    with pytest.raises(WorkerBroken, match="^only 102 MiB of 16.0 GiB are left"):
        home.after(5.0, free=0.1)


def test_the_thread_looks_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.peer.health.memory_watch.LOOK_SECONDS", 0.01)
    home = Home(tmp_path, memory=2 * GIB, size=1)
    home.family = 3 * GIB
    with home.watch as watch:
        while not watch.last.pressure:
            pass
    with pytest.raises(WorkerBroken):
        home.watch.relieve(home.batches)

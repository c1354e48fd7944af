"""Micro-batches: their size is tried out for real, remembered, halved when memory runs out, and grown back.

Notable:
- a try is what training does with a micro-batch: forward, backward, the check that it is finite, the sum;
- on a GPU one call of each new size is not timed: kernels are compiled, loaded and chosen in it. They are compiled for
  one example and, once more, for any greater number: one example is tried only where two do not fit;
- sizes double while that pays; then the sizes half-way to the neighbours of the best are tried, and the best few once
  more in turns, so that another program's burst does not decide; on a CPU the clock stands while others have it;
- nothing is tried that the memory model says does not fit, corrected by what the tries before really took;
- running out of memory loses no example: the batch in hand goes on in smaller pieces, and what was accumulated stays.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from tt_cli import __version__
from tt_cli.checkpoint.checkpoint_files import write
from tt_cli.checkpoint.training_state import CheckpointError
from tt_cli.data.examples import Batch
from tt_cli.errors import TTError
from tt_cli.memory import shown
from tt_cli.model.allocator import attempt
from tt_cli.peer.device import Device
from tt_cli.peer.memory_budget import RoomMemory
from tt_cli.supervisor.events import Choice, Emit, Log

LARGEST_PROBE = 256
SLOWEST_MICRO_BATCH = 4.0  # seconds on the CPU: a peer answers Ctrl-C and new parameters between micro-batches
WORTHWHILE = 1.02  # a larger size must be so many times as fast
PROBE_SECONDS = 10.0  # for all tries together; the first two sizes are tried in any case
SEARCH_SECONDS = 6.0  # of them for doubling; the rest compares the fastest
BUSY_SECONDS = 20.0  # the same where other programs have the processor meanwhile
WARM_UP_SECONDS = 300.0  # for all that is not timed, which is the compiler's; then no more sizes are tried
SHORT = 0.1  # seconds that a size is timed for at least
FINALISTS, ROUNDS = 3, 5  # how many sizes are compared, and how often
CLOSE, SLOWER = 0.85, 0.95  # shares of the highest rate: to be compared at first, and to stay
BUSY = 0.3  # of the time waited for the processor: such a choice is not remembered
CALM_SECONDS = 3600.0
REMEMBERED = 16  # choices in one file, of other devices and settings


def waiting_seconds() -> float:
    """Seconds that this thread was ready to run while others had the processor; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def undisturbed_seconds() -> float:
    """A clock that stands while other programs have the processor."""
    return time.perf_counter() - waiting_seconds()


@dataclass(frozen=True)
class BatchSettings:
    """Settings that a choice holds for; with others it is tried out anew. memory: the device's bound in bytes.

    kernels: how elementwise work runs, "compiled" or "eager".
    """

    device: str
    precision: str
    threads: int
    memory: int | None
    target_batch_size: int
    kernels: str = "eager"
    version: str = __version__
    torch: str = torch.__version__

    def key(self) -> str:
        """All of it, as a key in the file of choices."""
        return json.dumps(asdict(self), sort_keys=True)


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True))
class SizeChoice:
    """A size, its samples per second, why the search took it, and on which day, where it is a remembered one."""

    size: Annotated[int, Field(ge=1, le=LARGEST_PROBE)]
    rate: Annotated[float, Field(gt=0)]
    reason: Annotated[str, Field(max_length=500)]
    day: Annotated[str, Field(max_length=10)] = ""


_CHOICES = TypeAdapter(dict[str, SizeChoice])


class MicroBatchSearch:
    """Finds the fastest micro-batch that fits.

    compute: one micro-batch of a given size, as in training, done when it returns. The target batch limits sizes: one
    micro-batch should not overshoot the swarm's step. most: limits them in its place. patient: a GPU, whose
    micro-batches may take long, and whose time is the wall's: the thread that waits for a processor keeps it from
    nothing. clock: of tries; wall: of all.
    """

    def __init__(
        self,
        compute: Callable[[int], None],
        memory: RoomMemory,
        target_batch_size: int,
        most: int | None = None,
        *,
        patient: bool,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.perf_counter,
    ):
        self._compute, self._memory, self._wall = compute, memory, wall
        self._clock = clock or (wall if patient else undisturbed_seconds)
        self._patient = patient
        self._target = target_batch_size
        self._largest = max(1, min(LARGEST_PROBE, most or target_batch_size // 4))
        self._seconds: dict[int, list[float]] = {}  # of each size
        self._spent = self._took = 0.0  # undisturbed, and by the clock on the wall
        self._warming = 0.0  # by the clock on the wall, in calls that are not timed
        self._excess = 1.0  # measured over predicted memory
        self._stopped = ""

    def run(self) -> SizeChoice:
        """Raises TTError when not even one example fits."""
        two = self._patient and self._largest > 1 and self._memory.predicted(2) <= self._memory.limit
        size = 2 if two else 1
        while not self._stopped and self._fits(size) and self._try(size):
            self._stopped = self._enough(size)
            size *= 2
        if size > 1 and not self._seconds:
            self._try(1)
        if not self._seconds:
            raise TTError(
                f"not one example fits in the {shown(self._memory.limit)} that this peer may take: close programs that "
                "use memory, or give --device cpu or a larger --memory"
            )
        self._compare()
        self._memory.release()
        best = self._best()
        tried = ", ".join(map(str, sorted(self._seconds)))
        reason = f"fastest of {tried} at {self._rate(best):.1f} samples/s; {self._stopped}"
        return SizeChoice(best, self._rate(best), reason)

    def _enough(self, size: int) -> str:
        """The reason for which none larger than this is tried, "" where twice as many are."""
        if 2 * size > self._largest:
            return f"the largest tried, for a target batch of {self._target}"
        if self._warming > WARM_UP_SECONDS:
            return f"compiling for more sizes takes too long: {self._warming:.0f} s so far"
        highest = max(map(self._rate, self._seconds))
        if size >= 4 and max(self._rate(size), self._rate(size // 2)) < SLOWER * highest:
            return "larger ones are no faster"
        expected = 2 * size / self._rate(size)
        if expected > SLOWEST_MICRO_BATCH and not self._patient:
            return f"larger ones take over {SLOWEST_MICRO_BATCH:g} s"
        if len(self._seconds) > 1 and not self._may_go_on(expected, SEARCH_SECONDS):
            return f"no more were tried within {PROBE_SECONDS:g} s"
        return ""

    def _compare(self) -> None:
        """The fastest and the sizes half-way to their neighbours, in turns; those that fall behind are left out."""
        best = self._best()
        close = [size for size in self._seconds if self._rate(size) >= CLOSE * self._rate(best)]
        finalists = sorted(close, key=self._rate, reverse=True)[:FINALISTS]
        finalists += [size for size in (best * 3 // 4, best * 3 // 2) if self._sensible(size)]
        again = defaultdict[int, list[float]](list)
        for _ in range(ROUNDS):
            if len(finalists) < 2:
                return
            for size in list(finalists):
                expected = size / self._rate(size if size in self._seconds else best)
                if not self._may_go_on(expected, PROBE_SECONDS):
                    return
                if size in self._seconds:
                    # the first tries touched memory for the first time: they count no more
                    again[size].append(self._timed(size))
                    self._seconds[size] = again[size]
                elif not self._try(size):
                    finalists.remove(size)
            highest = max(map(self._rate, finalists))
            finalists = [size for size in finalists if self._rate(size) >= SLOWER * highest]

    def _rate(self, size: int) -> float:
        """Samples per second."""
        return size / statistics.median(self._seconds[size])

    def _best(self) -> int:
        """The smallest size that no other beats by enough."""
        highest = max(map(self._rate, self._seconds))
        return min(size for size in self._seconds if self._rate(size) * WORTHWHILE >= highest)

    def _may_go_on(self, seconds: float, within: float) -> bool:
        return self._spent + seconds < within and self._took < BUSY_SECONDS and self._warming < WARM_UP_SECONDS

    def _sensible(self, size: int) -> bool:
        """Half-way sizes: 3, 6, 12 … that fit and are not slow."""
        if size in self._seconds or not 1 <= size <= self._largest or size % 3:
            return False
        expected = size / self._rate(self._best())
        return (self._patient or expected <= SLOWEST_MICRO_BATCH) and self._fits(size)

    def _fits(self, size: int) -> bool:
        """By the memory model; one example is tried in any case."""
        expected = int(self._memory.predicted(size) * self._excess)
        if self._seconds and expected > self._memory.limit:
            self._stopped = f"{size} would take {shown(expected)} of the {shown(self._memory.limit)} it may use"
            return False
        return True

    def _try(self, size: int) -> bool:
        """Time one size; False when memory ran out."""
        seconds: list[float] = []
        if attempt(lambda: self._time(size, seconds))[1]:
            self._stopped = f"{size} does not fit"
            self._memory.release()
            return False
        self._seconds[size] = seconds
        largest = self._memory.predicted(max(self._seconds))
        self._excess = max(self._excess, self._memory.measured() / max(1, largest))
        return True

    def _time(self, size: int, seconds: list[float]) -> None:
        """Append the seconds of some tries; a first one that is short warms caches up and does not count."""
        if self._patient:
            began = self._wall()
            self._compute(size)
            self._warming += self._wall() - began
        if (first := self._timed(size)) > SHORT:
            seconds.append(first)
        while sum(seconds) < SHORT:
            seconds.append(self._timed(size))

    def _timed(self, size: int) -> float:
        started, began = self._clock(), self._wall()
        self._compute(size)
        seconds = max(1e-6, self._clock() - started)
        self._spent, self._took = self._spent + seconds, self._took + self._wall() - began
        return seconds


class Remembered:
    """Choices of earlier starts, in a file of the run's folder. A damaged file is said and written anew."""

    def __init__(self, path: Path, emit: Emit):
        self._path, self._emit = path, emit

    def find(self, settings: BatchSettings) -> SizeChoice | None:
        """The choice made with the same settings, with the day in its reason."""
        choice = self._read().get(settings.key())
        return None if choice is None else replace(choice, reason=f"tried out on {choice.day}: {choice.reason}"[:500])

    def keep(self, settings: BatchSettings, choice: SizeChoice) -> None:
        """Write it down; where that fails it is tried out again next time."""
        choices = self._read()
        choices.pop(settings.key(), None)
        choices[settings.key()] = replace(choice, day=time.strftime("%Y-%m-%d"))
        try:
            write(self._path, [_CHOICES.dump_json(dict(list(choices.items())[-REMEMBERED:]), indent=1)])
        except CheckpointError as error:
            self._emit(Log(f"the micro-batch will be tried out again next time: {error}", "warning"))

    def _read(self) -> dict[str, SizeChoice]:
        try:
            return _CHOICES.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._emit(Log(f"{self._path} is damaged ({type(error).__name__}) and is not used", "warning"))
            return {}


def choose_micro_batch(
    wanted: int | None,
    settings: BatchSettings,
    memory: RoomMemory,
    search: Callable[[], SizeChoice],
    remembered: Remembered,
    emit: Emit,
) -> int:
    """Examples per forward and backward: as the user wants it, as found before, or as `search` finds it now."""
    if wanted:
        emit(Choice("micro-batch", str(wanted), "--batch-size"))
        return wanted
    choice = remembered.find(settings)
    if choice is not None and (need := memory.predicted(choice.size)) > memory.limit:
        words = f"it would take {shown(need)} of the {shown(memory.limit)} it may use now"
        emit(Log(f"{choice.size} examples at a time were best once, but {words}: trying out anew"))
        choice = None
    if choice is None:
        started, waited = time.perf_counter(), waiting_seconds()
        choice = search()
        if waiting_seconds() - waited < BUSY * (time.perf_counter() - started):
            remembered.keep(settings, choice)
        else:
            choice = replace(choice, reason=f"{choice.reason}; other programs are busy: tried out again next time")
    emit(Choice("micro-batch", str(choice.size), choice.reason))
    return choice.size


class BatchStep(Protocol):
    """Computation of a piece of a batch, as peer.trainer.MicroStep does it.

    Called, it counts the piece in; where memory runs out it raises, and nothing of it is counted in.
    """

    device: Device

    def __call__(self, batch: Batch) -> object: ...
    def release(self) -> None: ...
    def changed(self, size: int) -> None: ...


class MicroBatches:
    """Takes a stream's batches of `together` examples through `step`, in pieces of `size` or fewer.

    now: as large as memory allows just now. together: `size` where it is not given.
    """

    def __init__(
        self,
        step: BatchStep,
        size: int,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        together: int | None = None,
    ):
        self.size = self.now = size
        self.together = together or size
        self._step, self._emit, self._clock = step, emit, clock
        self._changed_at = clock()

    def __call__(self, batch: Batch) -> None:
        """All examples of a batch. Raises TTError when not even one fits."""
        if self.now < self.size and self._clock() > self._changed_at + CALM_SECONDS:
            self._change(min(self.size, 2 * self.now), "an hour without running out of memory", "info")
        start = 0
        while start < len(batch):
            piece = batch[start : start + self.now]
            if attempt(partial(self._step, piece))[1]:
                self.halve(f"memory ran out on {self._step.device.name} with {len(piece)}")
            else:
                start += self.now

    def halve(self, why: str) -> None:
        """Go on with half as many examples at a time. Raises TTError at one."""
        self._step.release()
        if self.now == 1:
            raise TTError(
                f"not one example fits any more: {why}: close programs that use its memory, or give --device cpu or a "
                "smaller --memory"
            )
        self._change(self.now // 2, f"{why}; up to {self.size} again after an hour of calm", "warning")

    def _change(self, size: int, why: str, level: str) -> None:
        self.now, self._changed_at = size, self._clock()
        self._emit(Log(f"{why}: going on with {self.now} examples at a time", level))
        self._emit(Choice("micro-batch", str(self.now), why))
        self._step.changed(self.now)


def repeated(few: Batch, size: int) -> Batch:
    """So many examples to try out, from a few."""
    times = -(-size // len(few))
    return Batch({name: torch.cat([tensor] * times) for name, tensor in few.tensors.items()})[:size]

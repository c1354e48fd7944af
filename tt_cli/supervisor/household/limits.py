"""Limits of a household on when a peer may work, each of which says "go on", "hold" or "pause", and why.

Held, a peer computes nothing and stays in the swarm: it goes on within a second. Paused, it has left the swarm and
holds no memory. Temperature and use change quickly, so they hold; hours pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tt_cli.supervisor.events import Choice, Emit, Event, Log
from tt_cli.supervisor.household.hours import Hours
from tt_cli.supervisor.household.sensors import Sensor

LOOK_SECONDS = 5.0
COOLER = 5.0  # degrees below the limit at which a hot GPU works again
QUIET_SECONDS = 120.0  # without use, until a desktop counts as free
USED_SECONDS = 600.0  # of use, after which the peer gives its memory free too


@dataclass(frozen=True)
class Verdict:
    """Permission to work. until: Unix time at which that changes, where it is known."""

    action: Literal["go on", "hold", "pause"] = "go on"
    reason: str = ""
    until: float | None = None


GO_ON = Verdict()
_BY_STRICTNESS = ("go on", "hold", "pause")


@dataclass(frozen=True)
class Origin:
    """A limit as a person set it: ("hours", "23:00-07:00", "--hours").

    value: "" for a switch. source: the flag, or the settings file.
    """

    name: str
    value: str
    source: str

    def __str__(self) -> str:
        if self.source.startswith("--"):
            return f"{self.source} {self.value}".strip()
        return f"{self.name} = {self.value or 'true'} in {self.source}"


class HouseholdLimit(Protocol):
    """One limit. `look` is called every few seconds by one thread, which it may keep waiting for seconds."""

    origin: Origin

    def announced(self) -> Event:
        """What watches this limit, said once, at the start."""

    def look(self, now: float) -> Verdict:
        """Judge what the peer may do at `now` (Unix time)."""


class HoursLimit:
    """Works in these hours alone."""

    def __init__(self, hours: Hours, origin: Origin):
        self.hours, self.origin = hours, origin

    def announced(self) -> Event:
        return Choice("hours", self.hours.text, f"{self.origin.source}, in local time")

    def look(self, now: float) -> Verdict:
        time.tzset()  # a laptop may be in another time zone since
        if self.hours.allow(now):
            return GO_ON
        until = self.hours.changes_at(now)
        return Verdict("pause", f"{until_words(until, now)} ({self.origin})".strip(), until)


class TemperatureLimit:
    """Holds at `limit` °C, goes on when the GPU is five degrees cooler. Without a sensor it warns and does nothing."""

    def __init__(self, limit: float, sensor: Sensor | None, origin: Origin):
        self.limit, self.origin = limit, origin
        self._sensor, self._hot = sensor, False

    def announced(self) -> Event:
        if self._sensor is None:
            nothing = "neither nvidia-smi nor /sys/class/hwmon tells a GPU's temperature here"
            return Log(f"{self.origin} has no effect: {nothing}", "warning")
        reason = f"{self.origin.source}, by {self._sensor.source}"
        return Choice("GPU temperature", f"at most {self.limit:g} °C", reason)

    def narrow(self, uuid: str) -> None:
        """Look at that GPU alone, where the sensor can."""
        if self._sensor is not None and self._sensor.of is not None:
            self._sensor = self._sensor.of(uuid)

    def look(self, now: float) -> Verdict:
        degrees = None if self._sensor is None else self._sensor.read()
        if degrees is None:
            return GO_ON
        self._hot = degrees >= self.limit or (self._hot and degrees > self.limit - COOLER)
        if not self._hot:
            return GO_ON
        return Verdict("hold", f"the GPU has {degrees:.0f} °C; goes on at {self.limit - COOLER:g} °C ({self.origin})")


class IdleLimit:
    """Works while nobody uses the desktop. Used for long, it pauses, so that its memory is free for other programs."""

    def __init__(self, sensor: Sensor, origin: Origin):
        self.origin = origin
        self._sensor, self._used_since = sensor, 0.0

    def announced(self) -> Event:
        words = f"while nobody uses the desktop, by {self._sensor.source}"
        return Choice("idle only", words, f"{self.origin.source}; free after {QUIET_SECONDS:.0f} s without use")

    def look(self, now: float) -> Verdict:
        idle = self._sensor.read()
        if idle is None or idle >= QUIET_SECONDS:
            self._used_since = 0.0
            return GO_ON
        self._used_since = self._used_since or now
        action: Literal["hold", "pause"] = "pause" if now - self._used_since >= USED_SECONDS else "hold"
        return Verdict(action, f"the desktop is in use ({self.origin})")


class HouseholdLimits:
    """All limits of one peer, looked at in the background. Without any, it may always go on.

    verdict: the strictest of the last look.
    """

    def __init__(self, limits: Sequence[HouseholdLimit] = (), clock: Callable[[], float] = time.time):
        self._limits, self._clock = limits, clock
        self.verdict = GO_ON
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look_on, name="limits", daemon=True)

    def begin(self, emit: Emit) -> None:
        """Say what is watched and look for the first time; then go on looking in the background."""
        for limit in self._limits:
            emit(limit.announced())
        self._look()
        if self._limits:
            self._watch.start()

    def narrow(self, uuid: str) -> None:
        """Let the temperature of that GPU alone count: others of the machine may have peers of their own."""
        for limit in self._limits:
            if isinstance(limit, TemperatureLimit):
                limit.narrow(uuid)

    def end(self) -> None:
        """No more looks. Does not wait for the one that is being made."""
        self._ended.set()

    def _look(self) -> None:
        now = self._clock()
        verdicts = [limit.look(now) for limit in self._limits]
        self.verdict = max(verdicts, key=lambda verdict: _BY_STRICTNESS.index(verdict.action), default=GO_ON)

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()


def until_words(until: float | None, now: float) -> str:
    """A moment as a person says it: "until 23:00", "until Mon 23:00", "until 3 Dec 23:00"; "" for unknown."""
    if until is None:
        return ""
    then, today = time.localtime(until), time.localtime(now)
    form = "%H:%M"
    if (then.tm_year, then.tm_yday) != (today.tm_year, today.tm_yday):
        form = "%a %H:%M" if until - now < 6 * 86400 else f"{then.tm_mday} %b %H:%M"
    return f"until {time.strftime(form, then)}"

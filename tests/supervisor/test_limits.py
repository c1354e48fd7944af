"""The limits of a household: when they hold, when they pause, when they let go; and what the machine tells."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tt_cli.supervisor.events import Choice, Event, Log
from tt_cli.supervisor.household import sensors
from tt_cli.supervisor.household.hours import Hours
from tt_cli.supervisor.household.limits import (
    QUIET_SECONDS,
    USED_SECONDS,
    HoursLimit,
    HouseholdLimits,
    IdleLimit,
    Origin,
    TemperatureLimit,
    Verdict,
    until_words,
)
from tt_cli.supervisor.household.sensors import NoDesktopSensor, Sensor, desktop_sensor, gpu_thermometer, nvidia_driver

NOON = time.mktime((2026, 1, 5, 12, 0, 0, 0, 0, -1))


class Reading:
    """A sensor that tells what it is told to."""

    def __init__(self, value: float | None) -> None:
        self.value = value
        self.sensor = Sensor("a test", lambda: self.value)


def test_hours_pause_and_say_until_when() -> None:
    limit = HoursLimit(Hours.parse("23:00-07:00"), Origin("hours", "23:00-07:00", "--hours"))
    verdict = limit.look(NOON)
    assert (verdict.action, verdict.reason) == ("pause", "until 23:00 (--hours 23:00-07:00)")
    assert verdict.until == NOON + 11 * 3600
    assert limit.look(NOON + 12 * 3600).action == "go on"


def test_hours_follow_the_machine_into_another_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, noon = HoursLimit(Hours.parse("23:00-07:00"), Origin("hours", "23:00-07:00", "--hours")), 1767614400.0
    actions = []
    for zone in ("UTC0", "NZST-12"):
        monkeypatch.setenv("TZ", zone)
        actions.append(limit.look(noon).action)
    monkeypatch.undo()
    time.tzset()
    assert actions == ["pause", "go on"]


def test_a_hot_gpu_holds_until_it_is_five_degrees_cooler() -> None:
    reading = Reading(70.0)
    limit = TemperatureLimit(80.0, reading.sensor, Origin("max_gpu_temp", "80", "~/.config/tt/config.toml"))
    actions = []
    for value in (79.0, 80.0, 79.0, 76.0, 75.0, 79.0, None, 95.0):
        reading.value = value
        actions.append(limit.look(NOON).action)
    assert actions == ["go on", "hold", "hold", "hold", "go on", "go on", "go on", "hold"]
    words = limit.look(NOON).reason
    assert words == "the GPU has 95 °C; goes on at 75 °C (max_gpu_temp = 80 in ~/.config/tt/config.toml)"


def test_without_a_thermometer_it_is_told_once_and_nothing_is_held() -> None:
    limit = TemperatureLimit(80.0, None, Origin("max_gpu_temp", "80", "--max-gpu-temp"))
    line = limit.announced()
    assert isinstance(line, Log) and line.level == "warning"
    assert line.message.startswith("--max-gpu-temp 80 has no effect: neither nvidia-smi nor")
    assert limit.look(NOON).action == "go on"


def test_a_desktop_in_use_holds_then_pauses_and_is_free_after_quiet() -> None:
    reading = Reading(3.0)
    limit = IdleLimit(reading.sensor, Origin("idle_only", "", "--idle-only"))
    assert limit.look(NOON) == Verdict("hold", "the desktop is in use (--idle-only)")
    assert limit.look(NOON + USED_SECONDS - 1).action == "hold"
    assert limit.look(NOON + USED_SECONDS).action == "pause"
    reading.value = QUIET_SECONDS - 1
    assert limit.look(NOON + USED_SECONDS + 5).action == "pause"
    reading.value = QUIET_SECONDS
    assert limit.look(NOON + USED_SECONDS + 6).action == "go on"
    reading.value = 0.0
    assert limit.look(NOON + USED_SECONDS + 11).action == "hold"


def test_the_strictest_limit_counts() -> None:
    hot = TemperatureLimit(80.0, Reading(90.0).sensor, Origin("max_gpu_temp", "80", "--max-gpu-temp"))
    night = HoursLimit(Hours.parse("23:00-07:00"), Origin("hours", "23:00-07:00", "--hours"))
    told: list[Event] = []
    for limits, action in (([hot, night], "pause"), ([night, hot], "pause"), ([hot], "hold"), ([], "go on")):
        watched = HouseholdLimits(limits, clock=lambda: NOON)
        watched.begin(told.append)
        assert watched.verdict.action == action
        watched.end()
    assert [event.what for event in told if isinstance(event, Choice)][:2] == ["GPU temperature", "hours"]


@pytest.mark.parametrize(
    ("hours", "words"), [(None, ""), (1, "until 13:00"), (13, "until Tue 01:00"), (24 * 10, "until 15 Jan 12:00")]
)
def test_a_moment_in_words(hours: float | None, words: str) -> None:
    assert until_words(None if hours is None else NOON + 3600 * hours, NOON) == words


def program(folder: Path, name: str, body: str) -> None:
    """A program called `name` in a folder that the tests put first in PATH."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only programs there are."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("DISPLAY", raising=False)
    return folder


def test_the_hottest_gpu_of_nvidia_smi_counts(programs: Path, tmp_path: Path) -> None:
    program(programs, "nvidia-smi", 'test "$1" = --query-gpu=temperature.gpu && printf "61\\n74\\n[N/A]\\n"')
    found = gpu_thermometer(tmp_path)
    assert found is not None
    assert (found.source, found.read()) == ("nvidia-smi", 74.0)


def test_the_card_that_trains_counts_alone_once_it_is_known(programs: Path, tmp_path: Path) -> None:
    """One of two cards is hot, which is another peer's matter; a card that nvidia-smi does not find may be any."""
    by_uuid = 'case "$4" in GPU-cool) echo 61;; GPU-hot) echo 90;; "") printf "61\\n90\\n";; *) exit 6;; esac'
    program(programs, "nvidia-smi", by_uuid)
    limit = TemperatureLimit(80.0, gpu_thermometer(tmp_path), Origin("max_gpu_temp", "80", "--max-gpu-temp"))
    limits, actions = HouseholdLimits([limit]), []
    for uuid in ("", "GPU-cool", "GPU-hot", "GPU-of another name"):
        if uuid:
            limits.narrow(uuid)
        actions.append(limit.look(NOON).action)
    assert actions == ["hold", "go on", "hold", "hold"]


def test_an_nvidia_smi_without_a_driver_tells_nothing(programs: Path, tmp_path: Path) -> None:
    program(programs, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert gpu_thermometer(tmp_path) is None


@pytest.mark.parametrize(
    "words", ["Kernel Module  535.129.03  Thu Oct 19", "Open Kernel Module for x86_64  575.51.02  Release Build"]
)
def test_nvidia_s_driver_is_known_from_the_kernel_or_from_nvidia_smi(
    words: str, programs: Path, tmp_path: Path
) -> None:
    assert nvidia_driver(tmp_path) == ""
    program(programs, "nvidia-smi", "echo 560.94")
    assert nvidia_driver(tmp_path) == "560.94"  # as in WSL, whose kernel tells nothing
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 {words}\nGCC version")
    assert nvidia_driver(tmp_path) == words.split("  ")[1]


def test_an_nvidia_smi_that_hangs_tells_nothing(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "nvidia-smi", "exec /bin/sleep 60")
    monkeypatch.setattr(sensors, "SECONDS", 0.1)
    assert gpu_thermometer(tmp_path) is None


def test_other_gpus_tell_theirs_through_hwmon(programs: Path, tmp_path: Path) -> None:
    for number, (name, degrees) in enumerate((("k10temp", 99_000), ("amdgpu", 63_000))):
        folder = tmp_path / "class" / "hwmon" / f"hwmon{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "temp1_input").write_text(f"{degrees}\n")
    (tmp_path / "class/hwmon/hwmon1/temp2_input").write_text("71000\n")
    found = gpu_thermometer(tmp_path)
    assert found is not None
    assert (found.source, found.read()) == ("hwmon of amdgpu", 71.0)
    for file in (tmp_path / "class/hwmon/hwmon1").glob("temp*"):
        file.unlink()
    assert found.read() is None


SESSIONS = """
case "$1 $2" in
  "list-sessions --no-legend") printf " 2 1000 anna seat0 tty2\\n c1 120 gdm seat0 tty1\\n 7 1000 anna - pts/3\\n" ;;
  "show-session 2") printf "Class=user\\nRemote=no\\nState=active\\n"
    printf "IdleHint=%s\\nIdleSinceHint=%s\\nLockedHint=%s\\n" ;;
  "show-session c1") printf "Class=greeter\\nRemote=no\\nState=online\\nIdleHint=no\\n" ;;
  "show-session 7") printf "Class=user\\nRemote=yes\\nState=active\\nIdleHint=no\\n" ;;
esac
"""


@pytest.mark.parametrize(
    ("idle", "locked", "least", "most"),
    [("no", "no", 0, 0), ("yes", "no", 600, 700), ("no", "yes", float("inf"), float("inf"))],
)
def test_logind_tells_of_local_people_alone(
    idle: str, locked: str, least: float, most: float, programs: Path, tmp_path: Path
) -> None:
    since = int((time.time() - 600) * 1e6)
    body = SESSIONS.replace("IdleHint=%s", f"IdleHint={idle}", 1).replace("SinceHint=%s", f"SinceHint={since}", 1)
    program(programs, "loginctl", body.replace("LockedHint=%s", f"LockedHint={locked}"))
    found = desktop_sensor(tmp_path)
    assert found.source == "logind"
    seconds = found.read()
    assert seconds is not None and least <= seconds <= most


def test_x_tells_first_where_it_can(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    program(programs, "xprintidle", "echo 4500")
    found = desktop_sensor(tmp_path)
    assert (found.source, found.read()) == ("xprintidle", 4.5)


def test_terminals_tell_where_there_is_no_desktop(programs: Path, tmp_path: Path) -> None:
    program(programs, "loginctl", "echo System has not been booted with systemd >&2; exit 1")
    pts = tmp_path / "dev" / "pts"
    pts.mkdir(parents=True)
    for name, ago in (("0", 5000.0), ("1", 300.0)):
        (pts / name).touch()
        os.utime(pts / name, (time.time() - ago, 0))
    found = desktop_sensor(tmp_path)
    seconds = found.read()
    assert found.source == "terminals"
    assert seconds is not None and 300 <= seconds < 400


@pytest.mark.parametrize(
    ("mark", "content", "said"),
    [
        (".dockerenv", "", "from inside a container"),
        ("run/.containerenv", "", "from inside a container"),
        ("proc/version", "Linux version 5.15-microsoft-standard-WSL2", "from WSL"),
        ("tmp/.X11-unix/X0", "", "neither xprintidle nor loginctl tells"),
        ("run/user/1000/wayland-0", "", "neither xprintidle nor loginctl tells"),
    ],
)
def test_where_nothing_tells_it_is_said_why(mark: str, content: str, said: str, programs: Path, tmp_path: Path) -> None:
    file = tmp_path / mark
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    with pytest.raises(NoDesktopSensor, match=said):
        desktop_sensor(tmp_path)


def test_letters_of_another_encoding_end_no_watch() -> None:
    """`loginctl` tells names as they are; an error here would end the thread that looks at the limits, for good."""
    assert sensors.output_of("printf", r"Name=\377\nClass=user") == "Name=\ufffd\nClass=user"
    assert sensors.output_of("false") is None and sensors.output_of("there-is-no-such-program") is None

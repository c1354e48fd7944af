"""Sensors of this machine: how warm its GPU is, and how long nobody has used its desktop."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SECONDS = 5.0  # for a program to answer; a driver in trouble may never
GPU_DRIVERS = ("amdgpu", "radeon", "nouveau", "i915", "xe")


@dataclass(frozen=True)
class Sensor:
    """One reading and where it comes from. read: None when it cannot tell at this moment. of: narrowed to one GPU."""

    source: str
    read: Callable[[], float | None]
    of: Callable[[str], Sensor] | None = None


def gpu_thermometer(sys: Path = Path("/sys")) -> Sensor | None:
    """Degrees Celsius of the hottest GPU, or `of` one; None where nothing measures it."""
    if shutil.which("nvidia-smi") and _nvidia_degrees() is not None:
        return _nvidia_thermometer("")
    files = list(_hwmon_files(sys))
    if files:
        return Sensor(f"hwmon of {', '.join(sorted({name for name, _ in files}))}", lambda: _hottest(files))
    return None


def nvidia_driver(proc: Path = Path("/proc")) -> str:
    """Version of NVIDIA's driver, from the kernel or, as in WSL, from nvidia-smi; "" where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", (proc / "driver/nvidia/version").read_text())
        if found:
            return found[1]
    output = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    return output.strip().split("\n")[0]


def _nvidia_thermometer(uuid: str) -> Sensor:
    return Sensor("nvidia-smi", partial(_nvidia_degrees, uuid), _nvidia_thermometer)


def _nvidia_degrees(uuid: str = "") -> float | None:
    """The temperature of that GPU; of the hottest where none is named, or it is not found."""
    which = ("-i", uuid) if uuid else ()
    output = output_of("nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits", *which) or ""
    degrees = [float(line) for line in output.split("\n") if line.strip().isdigit()]
    return _nvidia_degrees() if uuid and not degrees else max(degrees, default=None)


def _hwmon_files(sys: Path) -> Iterable[tuple[str, Path]]:
    for folder in sorted((sys / "class" / "hwmon").glob("hwmon*")):
        with contextlib.suppress(OSError):
            name = (folder / "name").read_text().strip()
            if name in GPU_DRIVERS:
                yield from ((name, file) for file in sorted(folder.glob("temp*_input")))


def _hottest(files: Iterable[tuple[str, Path]]) -> float | None:
    degrees = []
    for _, file in files:
        with contextlib.suppress(OSError, ValueError):  # a GPU that sleeps answers with an error
            degrees.append(int(file.read_text()) / 1000)
    return max(degrees, default=None)


class NoDesktopSensor(Exception):
    """Nothing here tells whether somebody uses the desktop; one line says why."""


def desktop_sensor(root: Path = Path("/")) -> Sensor:
    """Seconds since somebody last used this machine's desktop. Raises NoDesktopSensor where nothing tells it.

    Devices under /dev/input are no help: the kernel keeps no time of their last event.
    """
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        raise NoDesktopSensor("the desktop cannot be seen from inside a container")
    with contextlib.suppress(OSError):
        if "microsoft" in (root / "proc/version").read_text().lower():
            raise NoDesktopSensor("the Windows desktop cannot be seen from WSL")
    if os.environ.get("DISPLAY") and shutil.which("xprintidle") and _x_seconds() is not None:
        return Sensor("xprintidle", _x_seconds)
    if shutil.which("loginctl") and _logind_seconds() is not None:
        return Sensor("logind", _logind_seconds)
    if any(any((root / place).glob(name)) for place, name in (("tmp/.X11-unix", "X*"), ("run/user", "*/wayland-*"))):
        raise NoDesktopSensor("neither xprintidle nor loginctl tells whether this desktop is in use")
    own = None
    with contextlib.suppress(OSError):
        own = os.ttyname(0)
    return Sensor("terminals", lambda: _terminal_seconds(root / "dev", own))


def _x_seconds() -> float | None:
    output = (output_of("xprintidle") or "").strip()
    return int(output) / 1000 if output.isdigit() else None


def _logind_seconds() -> float | None:
    """Idle seconds of people's local sessions. logind takes a terminal's from its last key, a desktop's from itself."""
    sessions = output_of("loginctl", "list-sessions", "--no-legend")
    if sessions is None:
        return None
    idle = [float("inf")]
    for line in filter(str.strip, sessions.split("\n")):
        output = output_of("loginctl", "show-session", line.split()[0])
        facts = dict(fact.split("=", 1) for fact in (output or "").split("\n") if "=" in fact)
        away = facts.get("Remote") == "yes" or facts.get("LockedHint") == "yes" or facts.get("State") == "closing"
        if facts.get("Class") != "user" or away:
            continue
        since = facts.get("IdleSinceHint", "0")
        idle.append(time.time() - int(since) / 1e6 if facts.get("IdleHint") == "yes" and since.isdigit() else 0.0)
    return max(0.0, min(idle))


def _terminal_seconds(dev: Path, own: str | None) -> float:
    """Idle seconds of all terminals but this process's own; a machine without a desktop is used through those."""
    used = 0.0
    for file in (*dev.glob("tty[1-9]*"), *dev.glob("pts/[0-9]*")):
        with contextlib.suppress(OSError):
            if str(file) != own:
                used = max(used, file.stat().st_atime)
    return max(0.0, time.time() - used)


def output_of(*command: str) -> str | None:
    """The output of a program; None when it fails or takes too long."""
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="replace") if answer.returncode == 0 else None

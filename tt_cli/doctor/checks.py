"""Checks for what would keep a peer from working on this machine, each with its fix: `tt doctor`.

Every check is quick, bounded in time and changes nothing. What needs torch runs in a process of its own (torch_probe).
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import httpx2

from tt_cli.errors import TTError
from tt_cli.identity.multiaddr import dial
from tt_cli.memory import shown
from tt_cli.run import RunConfig, folders

Verdict = Literal["pass", "warning", "fail"]
PROBE_SECONDS = 90.0
ANSWER_SECONDS = 5.0
FEW_FILES = 4096
# Between peers hivemind allows three seconds; a server's Date is of whole seconds.
SKEW_WARNING, SKEW_FAIL = 1.5, 2.5
BACKUPS = 4  # kept on disk, with the one being written
# The ranges of pyproject.toml that are known to matter: package, from, before.
RANGES = (("torch", "2.6", ""), ("hivemind", "1.1.12", "1.2"), ("numpy", "1.26", "2.4"), ("datasets", "5.1", "6"))
PYTHON = ((3, 11), (3, 14))
HUB = "https://huggingface.co"
CLOCK_FIX = "have it set by NTP: `timedatectl set-ntp true`"


@dataclass(frozen=True)
class Check:
    """One line. fix: what to do about it, "" where nothing is to be done."""

    name: str
    verdict: Verdict
    words: str
    fix: str = ""


@dataclass(frozen=True)
class Asked:
    """Scope of the checks. run: None for the machine alone. The functions raise TTError for what is wrong.

    login: who is logged in, None for nobody. member: does the run admit this person? limits: can they be watched here?
    """

    run: RunConfig | None
    name: str
    peers: Sequence[str]
    host: str
    port: int
    device: str | None
    login: Callable[[], str | None]
    member: Callable[[], object]
    limits: Callable[[], object]


def examine(asked: Asked) -> Iterator[Check]:
    """All checks, as they come."""
    yield versions()
    found = probe(asked.run, asked.device)
    yield from gpu(found)
    yield from memory(found)
    state = int(found.get("state_bytes", 0))
    yield disk(folders.home(), state)
    yield shared_memory(Path("/dev/shm"), state)
    yield open_files()
    yield from hub_and_clock(os.environ.get("HF_ENDPOINT") or HUB)
    yield account(asked)
    yield limits(asked)
    if asked.run is not None:
        yield port(asked.host, asked.port)
        yield reachable(asked.peers, asked.name)


def versions() -> Check:
    """Python and the libraries whose versions matter."""
    named, wrong, fixes = [f"Python {sys.version.split()[0]}"], [], []
    if not PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        wrong.append(f"Python {sys.version.split()[0]}")
        fixes.append("install tt with Python 3.11 to 3.13")
    for package, low, high in RANGES:
        wanted = ",".join([f">={low}"] + ([f"<{high}"] if high else []))
        try:
            version = metadata.version(package)
            named.append(f"{package} {version}")
            works = _parts(low) <= _parts(version) and (not high or _parts(version) < _parts(high))
        except metadata.PackageNotFoundError:
            named.append(f"no {package}")
            works = False
        if not works:
            wrong.append(named[-1])
            fixes.append(f"pip install '{package}{wanted}'")
    if wrong:
        return Check("versions", "fail", f"{', '.join(wrong)} will not work", "; ".join(fixes))
    return Check("versions", "pass", ", ".join(named))


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def probe(run: RunConfig | None, device: str | None) -> dict[str, Any]:
    """Result of torch_probe, or {"error": …}."""
    command = [sys.executable, "-m", "tt_cli.doctor.torch_probe", *([device] if device else [])]
    try:
        answer = subprocess.run(
            command,
            input="" if run is None else run.to_toml(),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        found = json.loads(answer.stdout.strip().rpartition("\n")[2])
        if not isinstance(found, dict):
            raise ValueError
        return found
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {PROBE_SECONDS:.0f} s: the GPU's driver may hang"}
    except (OSError, ValueError):
        return {"error": "the process that loads torch ended without an answer"}


def gpu(found: dict[str, Any]) -> Iterator[Check]:
    """The device that trains."""
    if "error" in found:
        fix = "restart the machine, or look at `nvidia-smi`" if "driver" in found["error"] else "install tt anew"
        yield Check("libraries", "fail", found["error"], fix)
        return
    works = [gpu for gpu in found["gpus"] if not gpu["fault"]]
    for gpu in found["gpus"]:
        if gpu["fault"]:
            bad = of_error("GPU", TTError(f"{gpu['name']}: {gpu['fault']}"), "give --device cpu")
            yield replace(bad, verdict="warning" if works else "fail")
    if found["gpu_error"]:
        yield Check("GPU", "fail", f"torch cannot use it: {found['gpu_error']}", "update its driver, or --device cpu")
    elif works:
        parts = [f"{gpu['name']} with {shown(gpu['free'])} of {shown(gpu['total'])} free" for gpu in works]
        yield Check("GPU", "pass", ", ".join([*parts, f"driver {found['driver']}"] if found["driver"] else parts))
        named = (shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
        yield compiler(next(filter(None, named), None), sysconfig.get_path("include"))
    elif found["hidden"]:
        yield replace(of_error("GPU", TTError(found["hidden"]), "give --device cpu"), verdict="warning")
    elif not found["gpus"]:
        yield Check("GPU", "warning", "none: the CPU trains, slowly", "nothing, if there is no GPU in this machine")


def compiler(program: str | None, headers: str) -> Check:
    """Check what Triton compiles a GPU's kernels with. program: the C compiler; headers: the folder of Python.h."""
    lacks = ["no C compiler"] * (not program) + ["no Python.h"] * (not Path(headers, "Python.h").exists())
    if not lacks:
        return Check("compiler", "pass", f"{program} and Python.h, for the GPU's elementwise kernels")
    words = f"{' and '.join(lacks)}: a GPU's elementwise kernels run eagerly, slower"
    return Check("compiler", "warning", words, "apt install gcc python3-dev, or conda install -c conda-forge gcc")


def memory(found: dict[str, Any]) -> Iterator[Check]:
    """The memory that the run takes, and whether it fits; or the device that is not there."""
    if found.get("refusal"):
        words, _, fix = found["refusal"].rpartition(": ")
        yield Check("device" if words.startswith("--device ") else "memory", "fail", words, fix)
    elif found.get("needs"):
        yield Check("memory", "pass", found["needs"])


def disk(home: Path, state: int) -> Check:
    """Room for backups. state: bytes of one, 0 for unknown."""
    free, need = shutil.disk_usage(home).free, BACKUPS * state or 2 * 10**9
    words = f"{shown(free)} free in {home}"
    fix = "free some, or set TT_HOME to a folder on another disk"
    if state and free < need:
        return Check("disk", "fail", f"{words}, and {BACKUPS} backups take {shown(need)}", fix)
    if free < 2 * need:
        return Check("disk", "warning", f"{words}, which is little", fix)
    return Check("disk", "pass", words)


def shared_memory(folder: Path, state: int) -> Check:
    """Room where the peer's processes share their tensors. state: as for `disk`."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("shared memory", "fail", f"{folder}: {error.strerror}", "mount a tmpfs there")
    need = 2 * state or 256 * 2**20
    fix = "in Docker, start the container with --shm-size=2g or --ipc=host; else mount -o remount,size=50% /dev/shm"
    if free < need:
        return Check("shared memory", "fail", f"{shown(free)} free in {folder}, and {shown(need)} are needed", fix)
    return Check("shared memory", "pass", f"{shown(free)} free in {folder}")


def open_files() -> Check:
    """Number of files that this user may open; the peer raises its own limit as far as that."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < FEW_FILES:
        fix = f"raise it: `ulimit -Hn {FEW_FILES}`, or nofile in /etc/security/limits.conf"
        return Check("open files", "warning", f"at most {most:,}", fix)
    return Check("open files", "pass", "no limit" if most == resource.RLIM_INFINITY else f"at most {most:,}")


def hub_and_clock(endpoint: str) -> Iterator[Check]:
    """The Hub: whether it answers, and what time it has."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        words, fix = "HF_HUB_OFFLINE is set: nothing is asked", "unset it for runs and data on the Hub"
    else:
        before = time.time()
        try:
            headers = httpx2.head(endpoint, timeout=ANSWER_SECONDS, headers={"User-Agent": "tt-doctor"}).headers
            after = time.time()
            yield Check("Hub", "pass", f"{endpoint} answers in {1000 * (after - before):.0f} ms")
            yield clock(headers.get("Date", ""), before, after)
            return
        except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, ValueError) as error:  # the last two: of a proxy
            words = f"{endpoint} does not answer: {error}"
            fix = "check the network and its proxy; runs and data that are on this machine work without it"
    yield Check("Hub", "warning", words, fix)
    yield Check("clock", "warning", "not compared with anything", CLOCK_FIX)


def clock(date: str, before: float, after: float) -> Check:
    """This machine's clock against a server's `Date`, asked between `before` and `after` (Unix time)."""
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return Check("clock", "warning", "the server said no time to compare with", CLOCK_FIX)
    ahead = max(before - (theirs + 1.0), 0.0) + min(after - theirs, 0.0)  # beyond what rounding and the way explain
    words = f"{abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) >= SKEW_FAIL:
        return Check("clock", "fail", f"{words}; peers ignore one that is 3 s off", CLOCK_FIX)
    if abs(ahead) >= SKEW_WARNING:
        return Check("clock", "warning", words, CLOCK_FIX)
    return Check("clock", "pass", "agrees with the Hub's")


def account(asked: Asked) -> Check:
    """The account that is logged in, and whether the run admits it."""
    try:
        user = asked.login()
        asked.member()
    except TTError as error:
        return of_error("account", error, "run `tt login`")
    words = "nobody is logged in; nothing here asks for it" if user is None else f"logged in as {user}"
    return Check("account", "pass", words)


def limits(asked: Asked) -> Check:
    """Limits of the settings file, and whether they can be watched on this machine."""
    try:
        asked.limits()
    except TTError as error:
        return of_error("limits", error, "correct the settings file")
    return Check("limits", "pass", "those of the settings file can be watched here")


def of_error(name: str, error: TTError, fix: str) -> Check:
    """Make a check of an error whose line ends in what to do, after its last colon or semicolon."""
    found = re.fullmatch(r"(.*)[:;] (.+)", str(error))
    return Check(name, "fail", found[1], found[2]) if found else Check(name, "fail", str(error), fix)


def port(host: str, number: int) -> Check:
    """The port on which the peer will listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(1)
        except OSError as error:
            words = f"cannot listen on {host}, port {number}: {error.strerror}"
            return Check("port", "fail", words, "end the program that uses it, or choose another --port or --host")
    if number == 0:
        return Check("port", "pass", "any free one; behind a router give --port and forward it, or --client-mode")
    return Check("port", "pass", f"{number} on {host} is free")


def reachable(peers: Sequence[str], run: str) -> Check:
    """Addresses through which the peer would join, and whether a node of the swarm answers there."""
    if not peers:
        fix = f"give --peer MULTIADDR (the screen of `tt aux-peer {run}` shows it), or begin with --new-swarm"
        return Check("swarm", "warning", "no peer of this run is known", fix)
    found = asyncio.run(dial(peers))
    silent = {address: why for address, why in found.items() if why}
    answered = len(found) - len(silent)
    words = f"at {answered} of {len(found)} known addresses a peer answers"
    if not silent:
        return Check("swarm", "pass", words)
    address, why = next(iter(silent.items()))
    fix = "check the address, that its aux peer runs, and that no firewall is between"
    return Check("swarm", "warning" if answered else "fail", f"{words}; {address}: {why}", fix)

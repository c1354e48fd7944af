"""The host's memory: how much is free, and how much a family of processes takes (Linux).

Free is what can be taken before something is ended for it: the kernel's own estimate, and what every control group
around this process (a container, a systemd unit) still allows, in both versions of control groups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tt_cli.supervisor.processes import family_of

_UNLIMITED = 1 << 60  # version 1 writes the largest multiple of a page
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


@dataclass(frozen=True)
class HostMemory:
    """Bytes that can still be taken, of how many in all, and whose they are: "this machine" or "this container"."""

    free: int
    total: int
    whose: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The least of what the machine and the control groups of this process leave free; `root` is for tests."""
    fields = _fields(root / "proc/meminfo")
    total = fields["MemTotal"]
    least = HostMemory(fields["MemAvailable"], total, "this machine")
    for limit, used in _groups(root):
        if limit < total and max(0, limit - used) < least.free:
            least = HostMemory(max(0, limit - used), limit, "this container")
    return least


def family_memory(pid: int) -> tuple[int, int]:
    """Bytes of a process and all that descend from it: of heaps and shared memory, of libraries and other mapped files.

    Memory that they share counts once. Processes that end meanwhile are left out.
    """
    private = 0
    files: dict[str, int] = {}
    for process in family_of(pid):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{process}")
            private += _private(folder)
            # forks share the files of their parent; another program has its own
            program = os.readlink(folder / "exe")
            files[program] = max(files.get(program, 0), _fields(folder / "status").get("RssFile", 0))
    return private, sum(files.values())


def _private(folder: Path) -> int:
    try:
        rollup = _fields(folder / "smaps_rollup")
        return rollup["Pss_Anon"] + rollup["Pss_Shmem"]
    except (OSError, KeyError):  # an old kernel: what is shared counts for each
        status = _fields(folder / "status")
        return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group that limits this process, its own first.

    In a container the paths may be those of the host, where nothing is mounted: then the mount itself is the group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, mount = (1, base / "memory") if controllers else (2, base)
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                yield _limit_and_use(folder, version)
            if folder == mount:
                break


def _limit_and_use(folder: Path, version: int) -> tuple[int, int]:
    """Raises OSError or ValueError where there is no limit. File pages that can be dropped at once do not count."""
    limit, used = (int((folder / name).read_text()) for name in _FILES[version])
    if limit >= _UNLIMITED:
        raise ValueError("no limit")
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return limit, max(0, used - droppable)


def _fields(path: Path) -> dict[str, int]:
    """Name → bytes, of the lines "Name:  123 kB"."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}

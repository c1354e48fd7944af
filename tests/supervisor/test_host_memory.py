"""Free memory of a machine and of the control groups around a process; what a family of processes takes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tt_cli.supervisor.host_memory import family_memory, host_memory

GIB, MIB = 2**30, 2**20
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 100 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def group(folder: str, version: int, limit: object, used: int, droppable: int = 0) -> dict[str, object]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    stat = f"anon 5\ninactive_file 3\n{prefix}inactive_file {droppable}\n"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": used, f"{folder}/memory.stat": stat}


def test_this_machine_has_free_memory() -> None:
    found = host_memory()
    assert 0 < found.free <= found.total


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    found = host_memory(write(tmp_path, {}))
    assert (found.free, found.total, found.whose) == (8 * GIB, 16 * GIB, "this machine")


@pytest.mark.parametrize(
    ("cgroup", "folder", "version"),
    [
        ("0::/user.slice/app.scope\n", "sys/fs/cgroup/user.slice/app.scope", 2),
        ("0::/user.slice/app.scope\n", "sys/fs/cgroup/user.slice", 2),
        ("0::/\n", "sys/fs/cgroup", 2),
        ("0::/docker/4f00\n", "sys/fs/cgroup", 2),  # the host's path, the container's mount
        ("5:cpu,cpuacct:/\n4:memory:/job/1\n0::/\n", "sys/fs/cgroup/memory/job/1", 1),
        ("4:memory:/docker/4f00\n", "sys/fs/cgroup/memory", 1),
    ],
)
def test_the_tightest_control_group_counts(cgroup: str, folder: str, version: int, tmp_path: Path) -> None:
    files = group(folder, version, 4 * GIB, 3 * GIB, droppable=GIB // 2)
    found = host_memory(write(tmp_path, {"proc/self/cgroup": cgroup, **files}))
    assert (found.free, found.total, found.whose) == (GIB * 3 // 2, 4 * GIB, "this container")


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 64 * GIB, "", "?"])
def test_a_group_without_a_limit_changes_nothing(limit: object, tmp_path: Path) -> None:
    version = 1 if isinstance(limit, int) and limit > 2**60 else 2
    folder, line = ("sys/fs/cgroup", "0::/") if version == 2 else ("sys/fs/cgroup/memory", "4:memory:/")
    files = group(folder, version, limit, GIB)
    assert host_memory(write(tmp_path, {"proc/self/cgroup": line, **files})).free == 8 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup", 2, GIB, 2 * GIB)
    assert host_memory(write(tmp_path, {"proc/self/cgroup": "0::/", **files})).free == 0


def test_what_forks_share_counts_once() -> None:
    """A parent with 64 MiB that its child shares: the family takes them once."""
    script = """
import os, signal
block = bytearray(b"x") * (64 << 20)
if os.fork() == 0:
    signal.pause()
print("ready", flush=True)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        private, files = family_memory(process.pid)
        assert 64 * MIB < private < 96 * MIB
        assert 0 < files < 64 * MIB
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_shared_memory_counts() -> None:
    before, _ = family_memory(os.getpid())
    shared = mmap.mmap(-1, 32 * MIB)
    shared.write(b"x" * 32 * MIB)
    assert family_memory(os.getpid())[0] - before > 30 * MIB


def test_a_process_that_is_gone_takes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert family_memory(process.pid) == (0, 0)

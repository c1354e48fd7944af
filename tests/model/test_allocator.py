"""Free memory, and freed blocks that stay with the process; in a process of its own, for it is set for good."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch

from tt_cli.model.allocator import free_memory

SCRIPT = """
import resource, sys
import torch
from tt_cli.model.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = torch.ones(10 << 20)  # 40 MiB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del block
print(*faults[20:])
"""


def faults(mode: str) -> list[int]:
    """Pages taken at each of the last ten blocks: at first a few more lie side by side, until a hole fits."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return [int(count) for count in done.stdout.split()]


def test_freed_blocks_are_used_again() -> None:
    """Without the setting each block of 40 MiB is paged in anew; with it, not one page is.

    glibc gives an aligned block no hole of just its size, and what small objects leave free beside it differs from
    start to start: the first handful of blocks may each lie behind the last.
    """
    pages = (40 << 20) // 4096
    assert min(faults("default")) > pages / 1024  # huge pages are 2 MiB
    assert max(faults("keep")) < 10


def test_free_memory_is_there() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 1 << 50


def test_mapped_tensors_are_like_the_others_and_forks_do_not_inherit_them() -> None:
    script = """
import os
import torch
from tt_cli.model.allocator import mapped_like

like = {"a": torch.empty(300, 7), "b": torch.empty(5, dtype=torch.uint8), "c": torch.empty(0), "d": torch.empty(())}
mapped = mapped_like(like)
for name, tensor in mapped.items():
    assert tensor.shape == like[name].shape and tensor.dtype == like[name].dtype and tensor.is_contiguous()
    tensor.fill_(3)
assert all(bool((tensor == 3).all()) for tensor in mapped.values())
child = os.fork()
if child == 0:
    mapped["a"].sum()  # not its memory
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == -signal.SIGSEGV

"""Free memory, and freed blocks that stay with the process; in a process of its own, for it is set for good."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator

import pytest
import torch
from testbed.spawned import Call, spawned

from tt_cli.model.allocator import device_memory, free_memory, keep_freed_memory, mapped_like


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Call]:
    with spawned({}) as call:
        yield call


def faults() -> list[int]:
    """Pages taken at each of the last ten blocks: at first a few more lie side by side, until a hole fits."""
    found = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = torch.ones(10 << 20)  # 40 MiB
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del block
    return found[20:]


def test_freed_blocks_are_used_again(elsewhere: Call) -> None:
    """Without the setting each block of 40 MiB is paged in anew; with it, not one page is.

    glibc gives an aligned block no hole of just its size, and what small objects leave free beside it differs from
    start to start: the first handful of blocks may each lie behind the last.
    """
    pages = (40 << 20) // 4096
    assert min(elsewhere(faults).result()) > pages / 1024  # huge pages are 2 MiB
    assert elsewhere(keep_freed_memory).result()
    assert max(elsewhere(faults).result()) < 10


def test_free_memory_is_there() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 1 << 50


def test_memory_of_apple_s_gpu_is_counted_by_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("current_allocated_memory", 3), ("driver_allocated_memory", 5), ("recommended_max_memory", 9)):
        monkeypatch.setattr(torch.mps, name, lambda value=value: value)
    assert device_memory(torch.device("mps")) == (3, 5, 6, 9)


def read_in_a_fork() -> int:
    like = {"a": torch.empty(300, 7), "b": torch.empty(5, dtype=torch.uint8), "c": torch.empty(0), "d": torch.empty(())}
    mapped = mapped_like(like)
    for name, tensor in mapped.items():
        assert tensor.shape == like[name].shape and tensor.dtype == like[name].dtype and tensor.is_contiguous()
        tensor.fill_(3)
    assert all(bool((tensor == 3).all()) for tensor in mapped.values())
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        mapped["a"].sum()  # not its memory
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_mapped_tensors_are_like_the_others_and_forks_do_not_inherit_them(elsewhere: Call) -> None:
    assert elsewhere(read_in_a_fork).result() == -signal.SIGSEGV

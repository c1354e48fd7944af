"""Memory that two processes share: what one writes the other reads, and who lets go of it frees it."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest

from tt_cli.swarm.shared_memory import Passage, StateBuffer

FORK = mp.get_context("fork")


def in_child(action: Any) -> object:
    """What `action` returns in a forked process."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=lambda: there.send(action()))
    child.start()
    try:
        assert here.poll(30)
        return here.recv()
    finally:
        child.join()


def test_what_is_written_is_read_at_its_place() -> None:
    buffer = StateBuffer.new()
    buffer.write(5, b"five")
    buffer.write(0, memoryview(b"zero"))
    assert buffer.read(0, 9) == b"zero\0five" and buffer.read(9, 0) == b""
    with pytest.raises(ValueError, match="holds 4 of 5 bytes at 5"):
        buffer.read(5, 5)
    view = buffer.view(12)
    assert bytes(view) == b"zero\0five\0\0\0" and bytes(StateBuffer.new().view(0)) == b""
    buffer.write(4, b"!")
    assert view[4] == ord("!")
    buffer.close()
    buffer.close()
    assert bytes(view[:4]) == b"zero"
    with pytest.raises(ValueError, match="closed"):
        buffer.read(0, 1)


def test_a_child_gets_buffers_by_their_numbers_in_any_order() -> None:
    passage = Passage()
    buffers = [StateBuffer.new() for _ in range(3)]
    for number, buffer in enumerate(buffers):
        buffer.write(0, b"%d" % number)
    numbers = [passage.send(buffer) for buffer in buffers]
    assert len(set(numbers)) == 3

    def read_and_write() -> list[bytes]:
        received = [passage.receive(number) for number in reversed(numbers)]
        received[0].write(1, b"back")
        with pytest.raises(LookupError):
            passage.receive(numbers[0])
        return [buffer.read(0, 1) for buffer in received]

    assert in_child(read_and_write) == [b"2", b"1", b"0"]
    assert buffers[2].read(0, 5) == b"2back"


def test_a_fork_alone_keeps_no_buffer() -> None:
    buffer = StateBuffer.new()

    def held() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("tt-state" in link for link in links)

    before = held()
    assert in_child(held) == 0 and held() == before >= 1
    buffer.close()
    assert held() == before - 1

"""Memory that the processes of one peer share: bytes across a fork, and states between the trainer and the averager.

A `StateBuffer` is memory without a name (memfd): it is freed when the last process that holds it lets go of it,
however that process ends, and no folder or its size limits it. Nothing here maps a file that another process may cut
short.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import weakref


def shared_bytes(size: int) -> memoryview:
    """Zeros that this process and those forked from it see alike. Not in /dev/shm, which is small in containers."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


_buffers: weakref.WeakSet[StateBuffer] = weakref.WeakSet()


def _let_go() -> None:
    """A child gets buffers by a `Passage`; by a fork it would keep memory that its parent frees."""
    for buffer in list(_buffers):
        buffer.close()


os.register_at_fork(after_in_child=_let_go)


class StateBuffer:
    """Memory for one state, which grows as it is written. Freed when it is closed or forgotten, in every process."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        _buffers.add(self)

    @classmethod
    def new(cls) -> StateBuffer:
        """An empty one."""
        return cls(os.memfd_create("tt-state", os.MFD_CLOEXEC))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put `data` at `offset`, in one copy without the interpreter's lock. For any thread."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes. Raises ValueError where nothing was written, or when it is closed."""
        if self._descriptor < 0:
            raise ValueError("the buffer is closed")
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise ValueError(f"the buffer holds {len(data)} of {size} bytes at {offset}")
        return data

    def view(self, size: int) -> memoryview:
        """Its first `size` bytes as memory of this process, zero where nothing was written. They outlive `close`."""
        if not size:
            return memoryview(b"")
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        return memoryview(mmap.mmap(self._descriptor, size))

    def fileno(self) -> int:
        """Its file descriptor, for `Passage`."""
        return self._descriptor

    def close(self) -> None:
        """Let go of it; twice does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Passage:
    """Hands buffers from a process to its child. Make it before the fork; `send` here, `receive` there.

    Each has a number, which goes to the child by another way, after it.
    """

    def __init__(self) -> None:
        # packets: one buffer each, whichever thread sends
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._there.setblocking(False)
        self._numbers = itertools.count()
        self._arrived: dict[int, StateBuffer] = {}

    def send(self, buffer: StateBuffer) -> int:
        """Give the child the same memory. Returns its number."""
        number = next(self._numbers)
        socket.send_fds(self._here, [number.to_bytes(8, "little")], [buffer.fileno()])
        return number

    def receive(self, number: int) -> StateBuffer:
        """The bytes sent under `number`; it is the caller's now. Raises LookupError when nothing was."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._there, 8, 1)
                if not data:
                    break
                self._arrived[int.from_bytes(data, "little")] = StateBuffer(descriptors[0])
        return self._arrived.pop(number)

"""Lines of machines in virtual time: so many bytes a second each way, which a machine's connections share alike.

A message crosses the sender's line and then the receiver's, in pieces; on each, connections take turns by the piece. A
stream has room for `WINDOW` bytes that were sent and not read yet: whoever writes faster waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

PIECE, WINDOW = 2**15, 2**19
FRAMES = 1514 / 1448  # bytes of a frame for those of TCP's payload in it
HEAD = 100  # bytes of a message beside what it holds
BULK = {"rpc_aggregate_part", "rpc_aggregate_part!", "rpc_fetch_average!", "rpc_state_chunks!"}
MBIT = 1e6 / 8

Connection = tuple[int, int]
"""From this machine to that one."""


class Rate(NamedTuple):
    """Bytes a second each way."""

    up: float = math.inf
    down: float = math.inf


class Direction:
    """One direction of a machine's line. rate: bytes a second."""

    def __init__(self, rate: float):
        self._rate, self._busy = rate, False
        self._waiting: dict[Connection, deque[tuple[int, Callable[[], None]]]] = {}  # in the order of their turns
        self._loop = asyncio.get_running_loop()
        self._nobody = contextvars.Context()  # of no process: a line carries while one hangs

    def carry(self, connection: Connection, count: int, then: Callable[[], None]) -> None:
        """Call `then` when so many bytes of a connection are over, after those that came before them."""
        if math.isinf(self._rate):
            then()
        else:
            self._waiting.setdefault(connection, deque()).append((count, then))
            self._begin()

    def _begin(self) -> None:
        if self._busy or not self._waiting:
            return
        connection = next(iter(self._waiting))
        pieces = self._waiting.pop(connection)
        count, then = pieces.popleft()
        if pieces:
            self._waiting[connection] = pieces
        self._busy = True
        self._loop.call_later(count * FRAMES / self._rate, self._end, then, context=self._nobody)

    def _end(self, then: Callable[[], None]) -> None:
        self._busy = False
        then()
        self._begin()


class Lines:
    """The lines of all machines. rates: machine → its line; who is not in it has no limit.

    factor: bytes that a byte of a gradient, an average or a state stands for, so that small ones pass for large ones.
    """

    def __init__(self, rates: Mapping[int, Rate], factor: float = 1.0):
        self._factor = factor
        self._up = defaultdict(partial(Direction, math.inf), {n: Direction(rate.up) for n, rate in rates.items()})
        self._down = defaultdict(partial(Direction, math.inf), {n: Direction(rate.down) for n, rate in rates.items()})
        self._arrived: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def size(self, what: str, message: Any) -> int:
        """Bytes of a message of this method; of None those of an end, or of a request that opens a stream."""
        held = message.ByteSize() if hasattr(message, "ByteSize") else 0
        return HEAD + round(held * (self._factor if what in BULK else 1.0))

    def acknowledged(self, machine: int) -> Mapping[int, int]:
        """Connection (the other machine) → bytes that arrived there, as `acknowledged_bytes` tells of the kernel."""
        return dict(self._arrived[machine])

    def carry(self, connection: Connection, count: int, then: Callable[[], None]) -> None:
        """Call `then` when a message of so many bytes has crossed both lines."""
        source, target = connection
        up, down = self._up[source], self._down[target]
        for start in range(0, count, PIECE):
            piece = min(PIECE, count - start)
            over = partial(self._arrive, connection, piece, then if start + piece == count else None)
            up.carry(connection, piece, partial(down.carry, connection, piece, over))

    def _arrive(self, connection: Connection, count: int, then: Callable[[], None] | None) -> None:
        self._arrived[connection[0]][connection[1]] += count
        if then is not None:
            then()
